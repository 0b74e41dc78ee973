"""Drafters and their parts, behind `protocols.Drafter`."""
