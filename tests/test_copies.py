"""What stands in several scripts under the same name is the same text: a repair in one cannot be forgotten in the others."""

import ast
from collections import defaultdict
from pathlib import Path

import stag_hunt_env

ROOT = Path(stag_hunt_env.__file__).resolve().parent
SCRIPTS = ("pretrain_vae.py", "pretrain_world_model.py", "hopplus_ppo.py", "hopplus_mcts.py")
OWN = {"Args", "main", "checked", "measure"}  # each script has its own
SEARCH_CHANGES = {  # what hopplus_mcts.py does otherwise than hopplus_ppo.py, because its learners search
    *("METHODS", "BY_DEVICE", "Choices", "rollout", "batch_of", "improve", "make_experiment", "real_batch", "iterate"),
    *("stage_seconds", "draw_pictures", "resolved", "evaluate", "adapt", "NUMBERS", "ppo_loss"),
}
PRETRAINING_SHARES = {
    *("StackedLinear", "Games", "play_games", "collect", "map_games", "save_games", "load_games", "_games_from"),
    *("save_atomically", "load_file", "interval", "clip_per_model", "keep_lines", "read_picture", "args_from"),
    "surviving",
}


def definitions(source):
    """{name: text} of the top-level classes, functions and constants"""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            lines = [d.lineno for d in node.decorator_list]
            node.lineno = min([node.lineno, *lines])
            found[node.name] = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.get_source_segment(source, node)
    return found


def differing(sources):
    """names that two of the sources define differently, and those that at least two define"""
    texts = defaultdict(list)
    for source in sources:
        for name, text in definitions(source).items():
            texts[name].append(text)
    shared = {name for name, copies in texts.items() if len(copies) > 1}
    return {name for name in shared if len(set(texts[name])) > 1}, shared


def sources():
    return [(ROOT / name).read_text() for name in SCRIPTS if (ROOT / name).exists()]


def test_copies_are_equal_to_the_letter():
    differ, shared = differing(sources())
    assert differ <= OWN | SEARCH_CHANGES, f"defined differently in two scripts: {sorted(differ - OWN - SEARCH_CHANGES)}"
    assert differ >= SEARCH_CHANGES, f"the same in both scripts after all: {sorted(SEARCH_CHANGES - differ)}"
    assert shared >= PRETRAINING_SHARES, f"no longer in both scripts: {sorted(PRETRAINING_SHARES - shared)}"


def test_one_changed_letter_is_noticed():
    first, second, *rest = sources()
    for name in PRETRAINING_SHARES:
        text = definitions(second)[name]
        second = second.replace(text, text.replace("\n", "  # changed\n", 1))
    differ, _ = differing([first, second, *rest])
    assert differ >= PRETRAINING_SHARES
