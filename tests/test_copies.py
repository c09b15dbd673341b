"""What stands in several scripts under one name is the same text: a repair in one cannot be forgotten in the others."""

import ast
from collections import defaultdict
from pathlib import Path

import stag_hunt_env

ROOT = Path(stag_hunt_env.__file__).resolve().parent
SCRIPTS = ("hopplus_ppo.py", "hopplus_mcts.py", "pretrain_vae.py", "pretrain_world_model.py")
OWN = {  # each script has its own
    *("Args", "RunArgs", "DataArgs", "OpponentArgs", "WorldModelArgs", "GROUPS"),
    *("FORMAT", "MAY_CHANGE"),
    *("make_args", "parse_args", "validate"),
    *("optimizer_step", "measure", "draw_pictures", "log_rows"),
    *("resume_run", "save_run", "main"),
}
SEARCH_CHANGES = {  # what hopplus_mcts.py does otherwise than hopplus_ppo.py, because its learners search
    "DEFAULTS",
    "FUSED",
    "Games",
    "MODELS_ON_CPU",
    "OpponentBelief",
    "PPO",
    "PPO_OMG",
    "goal_size",
    "history_after_game",
    "imagine",
    "infer_opponents",
    "make_networks",
    "make_ppo_batch",
    "needs_models",
    "opponent_model_losses",
    "policy_inputs",
    "ppo_loss",
    "rollout",
    "train_iteration",
    "update_history",
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


def differing(sources):
    """names that two of the sources define differently, and those that at least two define"""
    texts = defaultdict(list)
    for source in sources:
        for name, text in definitions(source).items():
            texts[name].append(text)
    shared = {name for name, copies in texts.items() if len(copies) > 1}
    return {name for name in shared if len(set(texts[name])) > 1}, shared


def sources():
    return [(ROOT / name).read_text() for name in SCRIPTS]


def test_copies_are_equal_to_the_letter():
    differ, shared = differing(sources())
    assert differ <= OWN | SEARCH_CHANGES, (
        f"defined differently in two scripts: {sorted(differ - OWN - SEARCH_CHANGES)}"
    )
    assert differ >= SEARCH_CHANGES, f"the same in both scripts after all: {sorted(SEARCH_CHANGES - differ)}"
    assert shared >= OWN, f"in one script only: {sorted(OWN - shared)}"
    assert len(shared - OWN) > 20
