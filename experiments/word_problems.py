"""A seeded grammar of arithmetic word problems: numbers drawn, sentences chosen among wordings, an integer answer known."""

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

Values = dict[str, Any]

PEOPLE = (
    *(
        (name, "she", "her")
        for name in ("Amara", "Bianca", "Chloe", "Daria", "Elif", "Freya", "Greta", "Hana", "Ines", "Jana", "Keiko", "Lucia")
    ),
    *(
        (name, "he", "his")
        for name in ("Anton", "Bruno", "Cyrus", "Dmitri", "Emeka", "Felix", "Goran", "Hugo", "Ivo", "Jamal", "Kofi", "Luca")
    ),
)
SMALL_THINGS = (
    "marbles",
    "stickers",
    "beads",
    "pencils",
    "shells",
    "stamps",
    "buttons",
    "coins",
    "crayons",
    "postcards",
    "badges",
    "ribbons",
)
WARES = ("notebooks", "mugs", "candles", "scarves", "lamps", "puzzles", "plates", "umbrellas", "brushes", "baskets", "clocks", "posters")
BAKES = ("rolls", "muffins", "pretzels", "tarts", "scones", "biscuits", "dumplings", "cupcakes")
PLANTS = ("tulips", "tomato plants", "cabbages", "rose bushes", "pepper plants", "sunflowers", "bean plants", "lettuces")
PLACES = ("a workshop", "a farm", "a small hotel", "a bookshop", "a bicycle repair shop", "a nursery", "a printing house", "a cafe")
CLOSINGS = ("", "", "", "Show how you got there.", "Explain every step.", "Work it out step by step.", "State the final number at the end.")


@dataclasses.dataclass(frozen=True)
class WordProblem:
    """A problem as it is put to the model, and its answer."""

    text: str
    answer: int


@dataclasses.dataclass(frozen=True)
class Template:
    """One kind of problem: how its values are drawn, the wordings of each of its sentences, and the answer."""

    draw: Callable[[Random], Values]
    sentences: tuple[tuple[str, ...], ...]
    answer: Callable[[Values], int]


def _people(rng: Random) -> Values:
    (a, she, her), (b, *_), (c, *_) = rng.sample(PEOPLE, 3)
    return {"a": a, "she": she, "She": she.capitalize(), "her": her, "b": b, "c": c}


def _packs(rng: Random) -> Values:
    packs, each = rng.randint(3, 15), rng.randint(4, 24)
    return {
        "packs": packs,
        "each": each,
        "given": rng.randint(2, packs * each // 2),
        "found": rng.randint(2, 30),
        "things": rng.choice(SMALL_THINGS),
    }


def _sprouts(rng: Random) -> Values:
    part, rows, per = rng.randint(2, 6), rng.randint(3, 14), rng.randint(2, 9)
    return {"rows": rows, "each": part * per, "part": part, "sold": rng.randint(1, rows * per - 1), "plants": rng.choice(PLANTS)}


def _bakery(rng: Random) -> Values:
    part, each, trays = rng.randint(2, 5), rng.randint(2, 6) * 4, rng.randint(2, 6)
    trays *= part
    rest = trays * each - trays * each // part
    return {"trays": trays, "each": each, "part": part, "later": rng.randint(3, rest - 1), "bakes": rng.choice(BAKES)}


def _shop(rng: Random) -> Values:
    first, second = rng.sample(WARES, 2)
    n, p, m, q = rng.randint(2, 7), rng.randint(2, 18), rng.randint(2, 6), rng.randint(3, 15)
    note = -(-(n * p + m * q + 1) // 50) * 50
    return {"n": n, "p": p, "m": m, "q": q, "note": note, "first": first, "second": second}


def _reading(rng: Random) -> Values:
    daily, days, rest_days, rest_daily = rng.randint(8, 40), rng.randint(3, 12), rng.randint(2, 9), rng.randint(6, 50)
    return {"pages": daily * days + rest_days * rest_daily, "daily": daily, "days": days, "rest_days": rest_days}


def _sharing(rng: Random) -> Values:
    friends, each = rng.randint(3, 9), rng.randint(6, 30)
    first = rng.randint(3, friends * each // 3)
    second = rng.randint(3, friends * each // 3)
    third = friends * each - first - second
    return {"friends": friends, "first": first, "second": second, "third": third, "things": rng.choice(SMALL_THINGS)}


def _tank(rng: Random) -> Values:
    inflow, minutes, start = rng.randint(12, 45), rng.randint(6, 40), rng.randint(2, 20) * 5
    leak = rng.randint(2, inflow - 5)
    return {"inflow": inflow, "leak": leak, "start": start, "volume": start + (inflow - leak) * minutes}


def _scores(rng: Random) -> Values:
    mean = rng.randint(60, 90)
    scores = [mean + rng.randint(-15, 8) for _ in range(3)]
    return {"s1": scores[0], "s2": scores[1], "s3": scores[2], "mean": mean}


def _savings(rng: Random) -> Values:
    earned, spent, weeks, start = rng.randint(20, 60), rng.randint(4, 15), rng.randint(4, 20), rng.randint(10, 90)
    return {"earned": earned, "spent": spent, "start": start, "price": start + (earned - spent) * weeks}


TEMPLATES = (
    Template(
        _packs,
        (
            (
                "{a} buys {packs} packs of {things} with {each} in every pack.",
                "In {a}'s drawer there are {packs} packs of {each} {things} each.",
            ),
            (
                "{She} gives {given} of them to {b} and then finds {found} more.",
                "{b} gets {given} of them, and later {a} picks up another {found}.",
            ),
            ("How many {things} does {a} have now?", "What number of {things} is {a} left with?"),
        ),
        lambda v: v["packs"] * v["each"] - v["given"] + v["found"],
    ),
    Template(
        lambda r: {
            "hours": r.randint(3, 9),
            "days": r.randint(3, 6),
            "wage": r.randint(11, 28),
            "spent": r.randint(20, 95),
            "place": r.choice(PLACES),
        },
        (
            (
                "{a} works at {place} for {hours} hours a day, {days} days a week.",
                "{place} employs {a} on {days} days of the week, {hours} hours each.",
            ),
            ("The pay is {wage} dollars an hour.", "Every hour brings {her} {wage} dollars."),
            ("Food costs {her} household {spent} dollars a week.", "Each week {she} spends {spent} dollars on groceries."),
            (
                "How many dollars of the pay remain after four weeks?",
                "What is left of {her} earnings, in dollars, at the end of four weeks?",
            ),
        ),
        lambda v: 4 * (v["hours"] * v["days"] * v["wage"] - v["spent"]),
    ),
    Template(
        lambda r: {
            "v1": r.randint(40, 75),
            "t1": r.randint(2, 6),
            "v2": r.randint(76, 110),
            "t2": r.randint(2, 5),
            "rest": r.randint(9, 99),
        },
        (
            (
                "A bus travels {t1} hours at {v1} km an hour and {t2} hours at {v2} km an hour.",
                "{a} drives at {v1} km an hour for {t1} hours, then at {v2} km an hour for another {t2} hours.",
            ),
            ("After that the destination is still {rest} km away.", "A sign then says that {rest} km are left to go."),
            ("How long is the whole route in kilometres?", "What is the distance from start to destination, in km?"),
        ),
        lambda v: v["v1"] * v["t1"] + v["v2"] * v["t2"] + v["rest"],
    ),
    Template(
        _shop,
        (
            (
                "{a} chooses {n} {first} at {p} dollars each and {m} {second} at {q} dollars each.",
                "{first} cost {p} dollars apiece and {second} {q} dollars apiece; {a} takes {n} of the former and {m} of the latter.",
            ),
            ("{She} hands over {note} dollars.", "The cashier receives {note} dollars from {her} purse."),
            ("How much change does {she} get back, in dollars?", "How many dollars are returned to {a}?"),
        ),
        lambda v: v["note"] - v["n"] * v["p"] - v["m"] * v["q"],
    ),
    Template(
        _sprouts,
        (
            (
                "A gardener sets {rows} rows of {plants}, {each} to a row.",
                "{a} plants {plants} in {rows} rows and puts {each} into each row.",
            ),
            ("Only one in {part} survives the frost.", "After a cold night just 1/{part} of them is alive."),
            ("{sold} of the survivors are sold.", "Of those that made it, a neighbour buys {sold}."),
            ("How many {plants} are still standing in the garden?", "How many living {plants} does the garden hold afterwards?"),
        ),
        lambda v: v["rows"] * v["each"] // v["part"] - v["sold"],
    ),
    Template(
        lambda r: {"c_age": r.randint(4, 14), "times": r.randint(2, 4), "older": r.randint(2, 11), "years": r.randint(2, 10)},
        (
            ("{c} is {c_age} years old.", "{c} has just turned {c_age}."),
            (
                "{b} is {times} times as old as {c}, and {a} is {older} years older than {b}.",
                "{b}'s age is {times} times that of {c}; {a} was born {older} years before {b}.",
            ),
            ("What will the three ages add up to in {years} years?", "In {years} years, how old will the three of them be together?"),
        ),
        lambda v: v["c_age"] + 2 * v["c_age"] * v["times"] + v["older"] + 3 * v["years"],
    ),
    Template(
        lambda r: {
            "shelves": r.randint(4, 12),
            "books": r.randint(15, 40),
            "lent": r.randint(5, 50),
            "boxes": r.randint(2, 6),
            "each": r.randint(5, 20),
        },
        (
            (
                "The school library has {shelves} shelves with {books} books on each.",
                "{shelves} shelves of {books} books each make up {a}'s collection.",
            ),
            (
                "{lent} books are lent out, and {boxes} boxes arrive with {each} new books in each.",
                "Then {boxes} boxes of {each} books are added while {lent} books go out on loan.",
            ),
            ("How many books are on the shelves now, if all new ones find room?", "What is the number of books present after that?"),
        ),
        lambda v: v["shelves"] * v["books"] - v["lent"] + v["boxes"] * v["each"],
    ),
    Template(
        _bakery,
        (
            ("A bakery takes {trays} trays of {each} {bakes} out of the oven.", "{a} bakes {trays} trays of {bakes}; a tray holds {each}."),
            (
                "By noon 1/{part} of them is sold, and {later} more go in the afternoon.",
                "1/{part} of them is gone before lunch, another {later} after it.",
            ),
            ("How many {bakes} remain at closing time?", "What is the number of {bakes} nobody bought?"),
        ),
        lambda v: v["trays"] * v["each"] - v["trays"] * v["each"] // v["part"] - v["later"],
    ),
    Template(
        _tank,
        (
            (
                "A tank for {volume} litres already contains {start} litres.",
                "{start} litres of water stand in a tank that can hold {volume} litres.",
            ),
            (
                "A pump adds {inflow} litres a minute, but {leak} litres a minute leak out.",
                "Each minute {inflow} litres flow in and {leak} litres are lost through a crack.",
            ),
            ("After how many minutes is it full?", "How many minutes does it take until the tank is full?"),
        ),
        lambda v: (v["volume"] - v["start"]) // (v["inflow"] - v["leak"]),
    ),
    Template(
        _reading,
        (
            (
                "{a} has a novel of {pages} pages and reads {daily} pages a day for {days} days.",
                "For {days} days {a} manages {daily} pages a day of a book that is {pages} pages long.",
            ),
            (
                "The rest is to be finished in {rest_days} days, the same number of pages each day.",
                "{She} wants to be through with it {rest_days} days later, reading evenly.",
            ),
            ("How many pages a day is that?", "How many pages must {she} read on each of those days?"),
        ),
        lambda v: (v["pages"] - v["daily"] * v["days"]) // v["rest_days"],
    ),
    Template(
        _sharing,
        (
            (
                "{a} brings {first} {things}, {b} brings {second} and {c} brings {third}.",
                "Into one bowl go {first} {things} from {a}, {second} from {b} and {third} from {c}.",
            ),
            ("They are dealt out equally to a class of {friends} children.", "All are divided evenly among {friends} cousins."),
            ("How many {things} does each child receive?", "What is one child's share of the {things}?"),
        ),
        lambda v: (v["first"] + v["second"] + v["third"]) // v["friends"],
    ),
    Template(
        lambda r: {
            "n": r.randint(2, 9),
            "price": r.randint(2, 12) * 20,
            "off": r.choice((5, 10, 15, 20, 25, 30, 40)),
            "fee": r.randint(4, 25),
            "wares": r.choice(WARES),
        },
        (
            (
                "A shop sells {wares} at {price} dollars each and takes {off}% off during a sale.",
                "During the sale, {wares} that used to cost {price} dollars each are {off} percent cheaper.",
            ),
            (
                "{a} orders {n} of them and pays {fee} dollars for delivery.",
                "{a} wants {n}, and bringing them to {her} door costs {fee} dollars on top.",
            ),
            ("What is the bill in dollars?", "How many dollars does {she} pay altogether?"),
        ),
        lambda v: v["n"] * (v["price"] * (100 - v["off"]) // 100) + v["fee"],
    ),
    Template(
        lambda r: {"long": r.randint(12, 60), "wide": r.randint(6, 40), "cost": r.randint(3, 19), "gate": r.randint(2, 5)},
        (
            (
                "A rectangular field is {long} metres long and {wide} metres wide.",
                "{a} owns a rectangular yard that measures {long} m by {wide} m.",
            ),
            (
                "It gets a fence all around except for a gate of {gate} metres, and a metre of fence costs {cost} dollars.",
                "Fencing costs {cost} dollars a metre; {gate} metres are left open for a gate.",
            ),
            ("How many dollars does the fence cost?", "What does the fence come to, in dollars?"),
        ),
        lambda v: (2 * (v["long"] + v["wide"]) - v["gate"]) * v["cost"],
    ),
    Template(
        lambda r: {
            "cars": r.randint(3, 12),
            "part": r.choice((3, 4, 5)),
            "k": r.randint(5, 16),
            "off": r.randint(5, 30),
            "on": r.randint(5, 40),
        },
        (
            (
                "A train has {cars} carriages with {part} sections of {k} seats in each.",
                "In each of a train's {cars} carriages there are {part} sections, every one with {k} seats.",
            ),
            (
                "When it departs, exactly one section in every carriage is empty and all others are full.",
                "It leaves with a single section of each carriage unused and every other seat taken.",
            ),
            ("At the next stop {off} people get off and {on} get on.", "Then {on} passengers board while {off} leave."),
            ("How many passengers are on the train now?", "How many people ride on?"),
        ),
        lambda v: v["cars"] * (v["part"] - 1) * v["k"] - v["off"] + v["on"],
    ),
    Template(
        _savings,
        (
            (
                "{a} has {start} dollars and wants a guitar that costs {price} dollars.",
                "A bicycle costs {price} dollars; {a} has put aside {start} dollars for it.",
            ),
            (
                "Each week {she} earns {earned} dollars and spends {spent} of them.",
                "Of the {earned} dollars {she} earns a week, {spent} are spent at once.",
            ),
            ("In how many weeks can {she} afford it?", "How many weeks must {she} wait?"),
        ),
        lambda v: (v["price"] - v["start"]) // (v["earned"] - v["spent"]),
    ),
    Template(
        lambda r: {"few": r.randint(2, 6), "grams": r.randint(5, 40) * 10, "factor": r.randint(2, 6), "stock": r.randint(1, 9) * 10},
        (
            ("A soup for {few} people takes {grams} grams of lentils.", "The recipe says {grams} g of rice for {few} guests."),
            (
                "{a} cooks it for {factor} times as many and has {stock} grams in the cupboard.",
                "{a} expects {factor} times that number of eaters; {stock} g are at home already.",
            ),
            ("How many grams are missing?", "How many grams does {she} still have to buy?"),
        ),
        lambda v: v["grams"] * v["factor"] - v["stock"],
    ),
    Template(
        _scores,
        (
            ("In three tests {a} scored {s1}, {s2} and {s3} points.", "{a}'s first three results are {s1}, {s2} and {s3} points."),
            ("{She} would like an average of {mean} over four tests.", "The aim is a mean of {mean} points over all four tests."),
            ("What score does the fourth test need?", "How many points must the last test bring?"),
        ),
        lambda v: 4 * v["mean"] - v["s1"] - v["s2"] - v["s3"],
    ),
)


def word_problem(rng: Random) -> WordProblem:
    """The next problem of `rng`: a template, its values, a wording for each sentence and for the closing request."""
    template = rng.choice(TEMPLATES)
    values = {**_people(rng), **template.draw(rng)}
    sentences = [rng.choice(wordings).format(**values) for wordings in template.sentences]
    sentences = [sentence[0].upper() + sentence[1:] for sentence in sentences]
    return WordProblem(" ".join(filter(None, [*sentences, rng.choice(CLOSINGS)])), template.answer(values))
