"""Stop texts in a stream: what may be the beginning of one is held back until it is known."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StopTexts:
    """A stream of text that ends before the first of some texts.

    Attributes:
      texts: the texts, none of them empty.
      held: text that may be the beginning of one of them.
      found: whether one has come; nothing follows then.
    """

    texts: tuple[str, ...]
    held: str = ""
    found: bool = False

    def __post_init__(self) -> None:
        if any(not text for text in self.texts):
            raise ValueError(f"stop_texts holds an empty text in {self.texts!r}; allowed are texts of at least one character")

    def push(self, piece: str) -> tuple["StopTexts", str]:
        """The stream after `piece`, and the text that may be given out."""
        if self.found or not piece:
            return self, ""
        text = self.held + piece
        begins = [place for place in (text.find(stop) for stop in self.texts) if place >= 0]
        if begins:
            return dataclasses.replace(self, held="", found=True), text[: min(begins)]
        held = max((_overlap(text, stop) for stop in self.texts), default=0)
        return dataclasses.replace(self, held=text[len(text) - held :]), text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
