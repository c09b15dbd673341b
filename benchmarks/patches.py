"""Mistakes, and what the world model is compared with, as edits of the text of hopplus_ppo.py or hopplus_mcts.py: what
stands there once -> what stands there instead."""

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import refuse

ROOT = Path(__file__).resolve().parent.parent
PPO_BATCH = "    return {name: x.flatten(1, 2) for name, x in batch.items()}\n"
IMAGINED_BELIEF = "        belief, output = perceive(args, env, networks, infer_opponents, *situation)\n"
CLIPPED = "    return next_board, reward.clamp(min(config.payoffs()), max(config.payoffs()))\n"
MASKED = "        return logits.float().masked_fill(~legal, -1e9).log_softmax(2)\n"
WEIGHT = "    weight = row_weights(windows.done, present[:, : shape[1]])\n"
MOA_STEP = '        optimizer_step(optimizer, losses["loss"], 1.0)\n'
MOA_LEARNS = "    log_probs = moa(rows.board, rows.walls, clock, goal, rows.legal)\n"
AFTER_WORLD_MODEL = "\n\ndef select_head("

OF_PLAYER_1 = """    batch = {name: x.flatten(1, 2) for name, x in batch.items()}
    if not real:
        return batch
    learner = torch.arange(len(weight), device=weight.device)
    first = learner - learner % args.config.num_players
    return {name: x[first] for name, x in batch.items()}
"""
WITHOUT_GOALS = """
        def without_goals(*given):
            belief = infer_opponents(*given)
            return belief._replace(goals=torch.zeros_like(belief.goals))

        belief, output = perceive(args, env, networks, without_goals, *situation)
"""
ALL_STEPS = "    weight = row_weights(windows.done, torch.ones_like(present[:, : shape[1]]))\n"
REWARDED = """    leaves = exited(env.config, with_future.board, with_future.next_board)[:, None, ..., 1:]
    rewarded = (same_game(with_future.done)[:, : shape[1]] & leaves).any(2)
    weight = row_weights(windows.done, present[:, : shape[1]] & rewarded)
"""
STEP_OF_PLAYER_1 = f"""        learner = torch.arange(len(losses["loss"]), device=env.device)
        learns = (learner % args.config.num_players == 0) | pretraining
        losses["loss"] = torch.where(learns, losses["loss"], 0.0)
{MOA_STEP}"""
OTHER_ORDER = """    number = torch.tensor([1, 2, 3, 4, 0, 6, 5], device=goal.device)  # stay first, hare before stag
    legal = rows.legal[..., number.argsort()]
    log_probs = moa(rows.board, rows.walls, clock, goal, legal)[..., number]
"""


def pixel_world_model(channel_weights: tuple[float, ...] | None) -> str:
    """The world model of pretrain_world_model.py that predicts every cell"""
    return f"""

import pretrain_world_model


class PixelWorldModel(pretrain_world_model.PixelWorldModel):
    def __init__(self, config, args):
        changes = {{"wm_hidden": args.wm_hidden, "wm_channel_weights": {channel_weights}}}
        super().__init__(config, pretrain_world_model.make_args(**changes))


WorldModel = PixelWorldModel
{AFTER_WORLD_MODEL}"""


PATCHES = {
    # Everybody trains on player 1's data.
    "one_player": {PPO_BATCH: OF_PLAYER_1},
    # In imagined rollouts the policy reads zeros instead of subgoals.
    "zero_subgoals": {IMAGINED_BELIEF: WITHOUT_GOALS},
    # Imagined rewards are what the world model says, not clipped to the game's payoffs.
    "unclipped": {CLIPPED: "    return next_board, reward\n"},
    # MOA may predict actions that are not legal.
    "unmasked": {MASKED: "        return logits.float().log_softmax(2)\n"},
    # MOA and q_phi also learn from the steps after a co-player left.
    "all_steps": {WEIGHT: ALL_STEPS},
    # MOA and q_phi only learn from games in which the co-player took prey.
    "rewarded": {WEIGHT: REWARDED},
    # The other players' MOA and q_phi stay as they were after the pretraining, which is one for all.
    "moa_of_player_1": {MOA_STEP: STEP_OF_PLAYER_1},
    # MOA learns the actions in another order than the one it is read in.
    "permuted_actions": {MOA_LEARNS: OTHER_ORDER},
    # The world model predicts every cell and the reward by mean squared error.
    "pixel": {AFTER_WORLD_MODEL: pixel_world_model(None)},
    # The same; an error in the players' planes counts twice.
    "pixel_weighted": {AFTER_WORLD_MODEL: pixel_world_model((2, 2, 2, 2, 1, 1, 1))},
}


def patched_script(script: str, patches: dict[str, dict[str, str]]) -> ModuleType:
    """The script with edits, name -> what is replaced by what"""
    path = ROOT / script
    text = path.read_text()
    for name, edits in patches.items():
        for before, after in edits.items():
            refuse(text.count(before) != 1, f"--patched {name}: {script} no longer has once:\n{before}")
            text = text.replace(before, after)
    module = ModuleType(f"patched_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where its dataclasses look for their module
    exec(compile(text, path, "exec"), vars(module))
    return module
