"""What stands in several scripts under one name is the same text: a repair in one cannot be forgotten in the others."""

import ast
from collections import defaultdict
from pathlib import Path

import stag_hunt_env

ROOT = Path(stag_hunt_env.__file__).resolve().parent
SCRIPTS = ("hopplus_ppo.py", "hopplus_mcts.py", "pretrain_vae.py", "pretrain_world_model.py")
OWN = {  # each script has its own
    *("Args", "FORMAT", "MUST_MATCH"),
    *("parse_args", "check", "main", "log"),
    *("collect", "draw", "load_data", "measure", "play_games"),
}
SEARCH_CHANGES = {  # what hopplus_mcts.py does otherwise than hopplus_ppo.py, because its learners search
    *("METHODS", "TRAINING", "default_args"),
    *("ActorCritic", "Games"),
    *("perceive", "update_history", "as_sample", "rollout"),
    *("opponent_losses", "imagined_step", "make_ppo_batch", "ppo_loss"),
    *("train_iteration", "make_stages", "record_time"),
}


def definitions(source):
    """{name: text} of the top-level classes, functions and constants"""
    found, lines = {}, source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def test_copies_are_equal_to_the_letter():
    texts = defaultdict(list)
    for script in SCRIPTS:
        for name, text in definitions((ROOT / script).read_text()).items():
            texts[name].append(text)
    shared = {name for name, copies in texts.items() if len(copies) > 1}
    differ = {name for name in shared if len(set(texts[name])) > 1}
    allowed = OWN | SEARCH_CHANGES
    assert differ <= allowed, f"defined differently in two scripts: {sorted(differ - allowed)}"
    assert differ >= SEARCH_CHANGES, f"the same in both scripts after all: {sorted(SEARCH_CHANGES - differ)}"
    assert len(shared - OWN) > 60
