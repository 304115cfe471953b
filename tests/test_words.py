"""Names use the field's words: the private words that they replaced do not return."""

import ast
import re

from tests import house

# Replaced word: better word. Words of names in any spelling (``REDUCE_TIED``, ``FewRanks``).
REPLACED = {
    "holdings": "parameter ownership",
    "dealt": "sharded, split",
    "judge": "evaluate", "judged": "evaluated", "jitter": "cost model",
    "lane": "P2P group", "lanes": "P2P groups",
    "neighbours": "process groups",
    "guide": "metadata sender",
    "epilogue": "optimizer ops",
    "watch": "observer", "watched": "observed", "learnt": "logged",
    "holder": "parameter reference",
    "families": "reduction groups", "family": "reduction group",
    "piece": "parameter shard, or what it is a part of", "pieces": "parameter shards",
    "believed": "expected", "anchor": "origin",
    "turn": "concurrent group, stage slot, RNG ticket", "turns": "the same",
}
REPLACED_PAIRS = {
    ("side", "by", "side"): "concurrent",
    ("few", "rank"): "time-shared plan", ("few", "ranks"): "time-shared plan",
    ("whole", "modules"): "modules that cannot be cut",
    ("spare", "quota"): "leftover quota",
    ("reduce", "tied"): "reduce grads",
}
# Names of arguments, variables and fields that do not describe their content.
VAGUE = frozenset({"one", "found", "given", "here", "known", "wanted", "told", "made", "beside"})
# (file or folder, word): reason why the word is right there.
ALLOWED = {
    ("raymm/data/conversations", "turn"): "a conversation has turns",
    ("raymm/data/conversations", "turns"): "a conversation has turns",
}


def words(name: str) -> tuple[str, ...]:
    """Split ``_FewRanks`` or ``few_ranks`` into ``("few", "ranks")``."""
    return tuple(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def names(file: str) -> set[str]:
    """Return the names of a file, its definitions, arguments, fields and variables."""
    found = {file.rpartition("/")[2].removesuffix(".py")}
    for node in ast.walk(house.tree(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def replaced(file: str) -> list[str]:
    """Return names of a file that contain a replaced word."""
    wrong = []
    for name in sorted(names(file)):
        parts = words(name)
        texts = [(word, REPLACED[word]) for word in parts if word in REPLACED]
        texts += [
            (" ".join(pair), better) for pair, better in REPLACED_PAIRS.items()
            if any(parts[i : i + len(pair)] == pair for i in range(len(parts)))
        ]
        wrong += [
            f"{file}: {name}: not {word!r} but {better}" for word, better in texts
            if not any(file.startswith(place) and word == one for place, one in ALLOWED)
        ]
    return wrong


def test_names_are_the_fields_words() -> None:
    assert [text for file in house.files() for text in replaced(file)] == []


def test_names_are_not_vague() -> None:
    vague = [
        f"{file}: {name}" for file in house.files() for name in sorted(names(file))
        if name.strip("_").lower() in VAGUE
    ]
    assert vague == []


def test_every_exception_is_needed(monkeypatch) -> None:
    allowed = list(ALLOWED)
    monkeypatch.setattr(f"{__name__}.ALLOWED", {})
    wrong = [text for file in house.files() for text in replaced(file)]
    for place, word in allowed:
        assert any(text.startswith(place) and f"not {word!r}" in text for text in wrong), place


def test_words_of_names() -> None:
    assert words("_FewRanks") == words("few_ranks") == ("few", "ranks")
    assert words("REDUCE_TIED") == ("reduce", "tied") and words("P2PGroup")[-1] == "group"
