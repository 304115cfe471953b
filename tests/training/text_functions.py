"""A metric of a user's."""


def length(text: str, answer: str) -> float:
    """Words that were written."""
    return float(len(text.split()))
