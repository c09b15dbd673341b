"""Runs the experiments that answer the project's questions on one GPU, and draws their figures.

    python benchmarks/experiments.py --list
    python benchmarks/experiments.py --section stays-8x8 --parallel 6        # a step of the ladder
    python benchmarks/experiments.py --section 1 7 --parallel 4
    python benchmarks/experiments.py --draw                          # only the tables and figures, from docs/data
    python benchmarks/experiments.py --patched one_player -- --method ppo     # hopplus_ppo.py with a mistake in it
    python benchmarks/experiments.py --patched moa_of_player_1 --script hopplus_mcts.py -- --num-seeds 5

A run that is finished is not made again (its folder in --run-dir has a file `finished`), and one that was cut off goes
on from its last checkpoint; sections share runs.

The ladder: games in which it pays more and more to know the others. Its settings were chosen with seeds 1 to 5
(docs/data/tuning.csv) and are tested with seeds 11 to 20; differences are paired by seed, intervals are Student's t.
"""

import concurrent.futures
import csv
import dataclasses
import glob
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import ModuleType
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import ACTION_NAMES, NUM_ACTIONS, UserError, command_line, parse, refuse

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
RECALLS = [f"recall/{action}" for action in range(NUM_ACTIONS)]  # in tables of earlier versions, which logged them
FOLLOWED = {  # name in our tables: key in metrics.jsonl
    "return": "charts/episodic_return",
    "stag": "charts/stag_share",
    "nothing": "charts/nothing_share",
    **{f"player_{i}": f"charts/episodic_return/player_{i}" for i in range(4)},
    "value_real": "losses/value_loss_real",
    "imagined_return": "imagined/return_mean",
    "real_return": "real/return_mean",
    "moa_top1": "moa/top1",
    "moa_ceiling_top1": "moa/ceiling/top1",
    "search_gain": "search/gain",
    "moa_nll": "moa/nll",
    **{f"moa_nll_{i}": f"per_agent/moa_nll/learner_{i}" for i in range(4)},
    "exact_match/1": "wm/exact_match/1",
    "exact_match/8": "wm/exact_match/8",
    "horizon": "wm/horizon",
}
TITLES = {  # of what is drawn
    "value_real": "value loss on real samples",
    "steps_to_2.8": "env steps to a return of 2.8",
    "fall": "best fifth of the run - last fifth",
    "moa_top1": "MOA, top-1",
    "moa_nll": "MOA's NLL",
    "moa_gap": "MOA's NLL above the players' own",
    "before/probe_accuracy": "pretrained: probe accuracy of g",
    "before/top1": "pretrained: MOA, top-1",
    "before/exact_match/1": "pretrained: exact after 1 step",
    "before/exact_match/20": "pretrained: exact after 20 steps",
}
STYLE = Path(__file__).resolve().parent / "plots.mplstyle"
RETURNS = (0.8, 1.2, 1.6, 2.0, 2.4, 2.8, 3.0)
SEEDS5, SEEDS8 = "--num-seeds 5 --log-every 2", "--num-seeds 8 --log-every 2"
SHORT, BRIEF = f"{SEEDS5} --total-timesteps 300000", f"{SEEDS5} --total-timesteps 150000"
LONG = "--seed 11 --num-seeds 5 --log-every 10 --total-timesteps 5000000 --num-envs 1024 --learning-rate 1e-3"
CALM = f"{SHORT} --learning-rate 5e-4"  # with which real samples alone learn to hunt the stag, too
OLD = "--critic-data mixed --trust-exact-match 0"
BADLY = "--imagination-horizon 32 --gae-lambda 1 --ppo-real-ratio 0.1"
BOARD8 = "--height 8 --width 8 --seed 11 --num-seeds 5 --num-envs 1024 --log-every 5"
PPO8 = f"{BOARD8} --total-timesteps 13107200 --method ppo --learning-rate 3e-4"
MCTS, MCTS_LONG = f"{SEEDS5} --total-timesteps 120000", f"{SEEDS5} --total-timesteps 400000"
UNTRAINED = "--total-timesteps 120000 --pretraining-updates 0 --offline-ratio 0 --search-model env"
FEW = "--num-envs 64 --ppo-real-ratio 0.05 --subgoal-updates 8 --subgoal-learning-rate 0.003 --pretraining-games 64"
HALF = "--ppo-real-ratio 0.5"
# HOP+ that is to meet others: it imagines whole games with co-players who pursue any subgoal, for actor and critic.
MEETS = f"{HALF} --imagined-goals prior --critic-data mixed --imagination-horizon 32 --subgoal-updates 8"
ADAPT = "evaluation/adapt.py RUN --no-references"
SEARCH_ADAPT = f"{ADAPT} --modes frozen search learning"
ALL_MODES = f"{ADAPT} --script hopplus_mcts.py --modes frozen search unguarded learning -- --planner mcts"
STRANGERS = f"{ADAPT} --sets strangers --modes frozen learning"
BEST = "evaluation/adapt.py RUN --best-response-steps 8000000"
BEST_STRANGERS = f"{BEST} --sets strangers --modes frozen learning"
CROSS = "evaluation/cross_play.py RUN"
WITH_RULES = "--seats learner,mixed,mixed,mixed"  # the policy itself trains with the players that models are shown


@dataclasses.dataclass(frozen=True)
class Run:
    flags: str
    script: str = "hopplus_ppo.py"
    then: tuple[str, ...] = ()  # what is done with its checkpoint afterwards
    before: tuple[str, str, str] | None = None  # script, flags, and the flag that takes its checkpoint
    patch: tuple[str, ...] = ()  # edits of the script, see PATCHES


def vae(loss: str) -> tuple[str, str, str]:
    return "pretrain_vae.py", f"--num-seeds 5 --loss {loss}", "--vae-checkpoint"


def world(flags: str) -> tuple[str, str, str]:
    return "pretrain_world_model.py", f"--num-seeds 5 {flags}", "--world-model-checkpoint"


INSIDE = f"{SHORT} --trust-exact-match 0 --critic-data mixed --ppo-real-ratio 0.05"
DEFAULT = Run(SHORT)
LONG_RUNS = {
    "PPO": Run(f"{LONG} --method ppo", then=(BEST, CROSS, BEST_STRANGERS)),
    "PPO, mixed": Run(f"{LONG} --method ppo {WITH_RULES}", then=(ADAPT, STRANGERS)),
    "+ subgoals": Run(f"{LONG} --method ppo-omg", then=(ADAPT, CROSS, STRANGERS)),
    "HOP+": Run(f"{LONG} {MEETS}", then=(ALL_MODES, STRANGERS, CROSS)),
}
LARGE_RUNS = {
    "PPO, 8x8": Run(PPO8, then=(BEST, BEST_STRANGERS)),
    "PPO, mixed, 8x8": Run(f"{PPO8} {WITH_RULES}", then=(ADAPT, STRANGERS)),
    "HOP+, 8x8": Run(f"{BOARD8} --total-timesteps 6553600 {MEETS}", then=(ALL_MODES, STRANGERS)),
}
SEARCHES = {
    "HOP+ MCTS": Run(MCTS, "hopplus_mcts.py", then=(SEARCH_ADAPT,)),
    "HOP, search prior 1": Run(f"{MCTS} --method hop-ours --search-prior 1", "hopplus_mcts.py", then=(SEARCH_ADAPT,)),
}
# The ladder: one learner, whose partner is one of three; the others hunt hares.
GRU = "benchmarks/baselines/ppo_gru.py"
PARTNERS = "evaluation/partners.py RUNS"
NEW_PARTNERS = "evaluation/partners.py RUNS --population nearest_stag"  # whom nobody met in training
TRAIN = "--seed 11 --num-seeds 10 --log-every 5 --num-envs 1024 --ent-coef 0.01 --learning-rate 1e-3"
MODELS = "--policy-hidden 256 --subgoal-hidden 128 --subgoal-selection final --kl-coef 0.01 --history-reset-prob 0.005"
HIDDEN = "--num-stags 2 --population first_stag,last_stag,nearest_hare"
ONE = f"{HIDDEN} --seats learner,mixed,nearest_hare,nearest_hare"
TASKS = {  # name: title, flags, million steps
    "stays-8x8": ("8x8, 9 steps, the partner stays", f"--height 8 --width 8 --final-time 9 --redraw never {ONE}", 8),
    "stays-4x4": ("4x4, 5 steps, the partner stays", f"--final-time 5 --redraw never {ONE}", 5),
    "redrawn-8x8": ("8x8, 9 steps, a new partner in every game", f"--height 8 --width 8 --final-time 9 {ONE}", 8),
    "redrawn-4x4": ("4x4, 5 steps, a new partner in every game", f"--final-time 5 {ONE}", 5),
    "drifts-4x4": ("4x4, 5 steps, a new partner after one game in ten", f"--final-time 5 --redraw 0.1 {ONE}", 5),
    "two-partners-4x4": (
        "4x4, 5 steps, two partners stay",
        f"--final-time 5 --redraw never {HIDDEN} --seats learner,mixed,mixed,nearest_hare",
        5,
    ),
    "commitment": (
        "4x4, the game ends with the first hunt",
        "--steps-after-first-hunt 1 --population nearest_stag,nearest_hare --redraw never"
        " --seats learner,mixed,mixed,mixed",
        5,
    ),
    "control-long": ("8x8, 35 steps, a new partner in every game", f"--height 8 --width 8 --final-time 35 {ONE}", 8),
    "control-known": (
        "4x4, 5 steps, the partner is always the same",
        "--num-stags 2 --final-time 5 --population first_stag --redraw never"
        " --seats learner,mixed,nearest_hare,nearest_hare",
        5,
    ),
}


def arms(task: str) -> dict[str, Run]:
    """What the policy may know, in one game"""
    _, flags, steps = TASKS[task]
    common = f"{TRAIN} {flags} --total-timesteps {steps}000000"
    models = f"{common} {MODELS} --method ppo-omg --memory-discount {0.5 if 'drifts' in task else 0.995}"
    then = (PARTNERS, NEW_PARTNERS) if "stays" in task else (PARTNERS,) if "drifts" in task else ()
    gru = "" if "--redraw" in flags else " --redraw game"
    inferring = f"{models} --offline-ratio 0.1" if "--height 8" in flags else models
    runs = {
        "none": Run(f"{common} --policy-hidden 256 --method ppo", then=then),
        "actions": Run(f"{inferring} --subgoals actions", then=then),
        "inferred": Run(f"{inferring} --subgoals inferred", then=then),
        "GRU": Run(f"{common} --hidden 256{gru}", GRU, then=then),
        "posterior": Run(f"{models} --subgoals posterior", then=then),
        "told": Run(f"{models} --subgoals oracle", then=then),
        "HOP+": Run(f"{TRAIN} {flags} --total-timesteps 2000000 {MODELS} --method hopplus {HALF}"),
    }
    if task != "redrawn-4x4":
        runs.pop("HOP+")
    return runs if "4x4" in task or "stays" in task else {name: runs[name] for name in ("none", "inferred", "told")}


SECTIONS = {  # name: title, runs, panels (kind, key)
    **{
        task: (TASKS[task][0], arms(task), [("points", "return"), ("late curves", "return"), ("together", "")])
        for task in TASKS
    },
    "1": (
        "Why was the value loss so high?",
        {
            "real samples only": Run(f"{CALM} --no-imagination"),
            "imagined for the actor (default)": Run(CALM),
            "mixed: for actor and critic": Run(f"{CALM} --critic-data mixed"),
            "mixed, Monte Carlo returns": Run(f"{CALM} --critic-data mixed --gae-lambda 1"),
            "mixed, subgoals zeroed": Run(f"{CALM} --critic-data mixed", patch=("zero_subgoals",)),
            "pixel head, for the actor": Run(CALM, patch=("pixel",)),
            "pixel head, mixed, unchecked": Run(f"{CALM} {OLD}", patch=("pixel", "unclipped")),
            "default, half as long": Run(BRIEF),
            "all old settings": Run(f"{BRIEF} {OLD} {BADLY}", patch=("unclipped",)),
            "all old settings, pixel head": Run(
                f"{BRIEF} {OLD} {BADLY} --pretraining-updates 50", patch=("pixel", "unclipped")
            ),
        },
        [("bars", "value_real"), ("bars", "return"), ("against", "value_real")],
    ),
    "2": (
        "Was player 1 favoured?",
        {
            "PPO": Run(f"{SEEDS8} --method ppo --total-timesteps 600000"),
            "PPO, shared": Run(f"{SEEDS8} --method ppo --total-timesteps 600000 --share-parameters"),
            "PPO, seats permuted": Run(f"{SEEDS8} --method ppo --total-timesteps 600000 --permute-ids"),
            "HOP+": Run(f"{SEEDS8} --total-timesteps 200000"),
            "HOP+, shared": Run(f"{SEEDS8} --total-timesteps 200000 --share-parameters"),
            "PPO, all learn from player 1": Run(
                f"{SEEDS8} --method ppo --total-timesteps 600000", patch=("one_player",)
            ),
            "MCTS, no pretraining": Run(f"{SEEDS8} {UNTRAINED}", "hopplus_mcts.py"),
            "MCTS, no pretraining, only player 1's MOA learns": Run(
                f"{SEEDS8} {UNTRAINED}", "hopplus_mcts.py", patch=("moa_of_player_1",)
            ),
            "MCTS, no pretraining, actions permuted": Run(
                f"{SEEDS8} {UNTRAINED}", "hopplus_mcts.py", patch=("permuted_actions",)
            ),
        },
        [("seats", "player"), ("seats", "moa_nll"), ("bars", "return")],
    ),
    "3": (
        "VAE: reconstruction or action loss?",
        {loss: Run(f"{SHORT} --method ppo-omg", then=(ADAPT,), before=vae(loss)) for loss in ("recon", "moa", "both")},
        [("bars", "before/probe_accuracy"), ("bars", "before/top1"), ("bars", "return"), ("adaptation", "standard")],
    ),
    "4": (
        "Can the world model be trusted?",
        {
            "pixel": Run(INSIDE, before=world("--wm-head pixel"), patch=("pixel",)),
            "pixel, weighted": Run(
                INSIDE,
                before=world("--wm-head pixel --wm-channel-weights 2 2 2 2 1 1 1"),
                patch=("pixel_weighted",),
            ),
            "structured": Run(INSIDE, before=world("")),
        },
        [("bars", "before/exact_match/1"), ("bars", "before/exact_match/20"), ("bars", "return"), ("curves", "return")],
    ),
    "5": (
        "Why did MOA collapse?",
        {
            "present (default)": DEFAULT,
            "rewarded": Run(SHORT, patch=("rewarded",)),
            "all steps": Run(SHORT, patch=("all_steps",)),
            "present, half as long": Run(BRIEF),
            "present, unmasked": Run(BRIEF, patch=("unmasked",)),
            "all steps, unmasked": Run(BRIEF, patch=("unmasked", "all_steps")),
            "MCTS": SEARCHES["HOP+ MCTS"],
            "MCTS, only player 1's MOA learns": Run(MCTS, "hopplus_mcts.py", patch=("moa_of_player_1",)),
            "MCTS, actions permuted": Run(MCTS, "hopplus_mcts.py", patch=("permuted_actions",)),
            "MCTS, actions permuted, unmasked": Run(MCTS, "hopplus_mcts.py", patch=("unmasked", "permuted_actions")),
            "MCTS, no pretraining": Run(f"{SEEDS8} {UNTRAINED}", "hopplus_mcts.py"),
            "MCTS, no pretraining, only player 1's MOA learns": Run(
                f"{SEEDS8} {UNTRAINED}", "hopplus_mcts.py", patch=("moa_of_player_1",)
            ),
        },
        [("bars", "moa_top1"), ("bars", "moa_gap"), ("seats", "moa_nll"), ("seats", "player"), ("recalls", "")],
    ),
    "6": (
        "Search",
        {
            "pUCT, 16 x 2 (default)": SEARCHES["HOP+ MCTS"],
            "Gumbel": Run(f"{MCTS} --root gumbel", "hopplus_mcts.py"),
            "one step": Run(f"{MCTS} --planner one-step", "hopplus_mcts.py"),
            "no search": Run(f"{MCTS} --planner none", "hopplus_mcts.py"),
            "no search, learning rate 5e-4": Run(f"{MCTS} --planner none --learning-rate 5e-4", "hopplus_mcts.py"),
            "4 simulations": Run(f"{MCTS} --num-simulations 4", "hopplus_mcts.py"),
            "32 simulations": Run(f"{MCTS} --num-simulations 32", "hopplus_mcts.py"),
            "HOP": Run(f"{MCTS} --method hop-ours", "hopplus_mcts.py"),
            "HOP, search prior 1": SEARCHES["HOP, search prior 1"],
            "pUCT, long": Run(MCTS_LONG, "hopplus_mcts.py"),
            "HOP, long": Run(f"{MCTS_LONG} --method hop-ours", "hopplus_mcts.py"),
            "HOP, search prior 1, long": Run(f"{MCTS_LONG} --method hop-ours --search-prior 1", "hopplus_mcts.py"),
        },
        [("bars", "steps_to_2.8"), ("bars", "fall"), ("curves", "return")],
    ),
    "7": (
        "Which module pays, and where?",
        {
            **LONG_RUNS,
            **SEARCHES,
            "HOP+, no memory": Run(f"{LONG} {MEETS} --memory-discount 0", then=(ADAPT,)),
            "HOP+, policy without subgoals": Run(f"{LONG} {MEETS} --subgoals none", then=(ADAPT,)),
            "PPO, few steps": Run(f"{SEEDS5} --total-timesteps 400000 --method ppo --num-envs 128"),
            "HOP+, few steps": Run(f"{SEEDS5} --total-timesteps 100000 {FEW}"),
            "few, discrete goals": Run(f"{SEEDS5} --total-timesteps 100000 {FEW} --goal-kind discrete --goal-dim 8"),
            "few, D = 8": Run(f"{SEEDS5} --total-timesteps 100000 {FEW} --goal-dim 8"),
            "few, optimistic": Run(f"{SEEDS5} --total-timesteps 100000 {FEW} --subgoal-selection optimistic"),
            "few, final": Run(f"{SEEDS5} --total-timesteps 100000 {FEW} --subgoal-selection final"),
            "few, no subgoals": Run(f"{SEEDS5} --total-timesteps 100000 {FEW} --subgoals none"),
            "PPO, 4h2s": Run(f"{SEEDS5} --total-timesteps 1000000 --num-stags 2 --method ppo"),
            "HOP+, 4h2s": Run(f"{SEEDS5} --total-timesteps 1000000 --num-stags 2 {HALF}"),
            **LARGE_RUNS,
        },
        [("bars", "steps_to_2.8"), ("adaptation", "standard"), ("meeting", "3 NH")],
    ),
    "8": (
        "How well does a learner adapt to players nobody trained with?",
        LONG_RUNS | LARGE_RUNS,
        [("adaptation", "strangers"), ("meeting", "3 waiting"), ("meeting", "3 noisy NH")],
    ),
}


@dataclasses.dataclass
class ExperimentArgs:
    section: tuple[str, ...] = tuple(SECTIONS)
    """which sections"""
    list: bool = False
    """only say what there is"""
    draw: bool = False
    """only draw the figures and print the tables from docs/data"""
    parallel: int = 3
    """runs at once"""
    only: tuple[str, ...] = ()
    """only these runs of the sections"""
    extra: str = ""
    """flags for all runs, for example to try the script on a CPU"""
    extra_then: str = ""
    """the same for what follows a run"""
    run_dir: str = "runs/experiments"
    """where the runs go"""
    docs: str = str(ROOT / "docs")
    """tables go to data, figures to results in here"""
    patched: tuple[str, ...] = ()
    """only run --script with these edits: one_player, zero_subgoals, unclipped, unmasked, all_steps, rewarded,
    moa_of_player_1, permuted_actions, pixel, pixel_weighted; its flags after --"""
    script: Literal["hopplus_ppo.py", "hopplus_mcts.py"] = "hopplus_ppo.py"
    """see there"""


@dataclasses.dataclass
class Args(ExperimentArgs):
    words: tuple[str, ...] = ()  # after --: flags of --script


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes, and what the world model is compared with, as edits of the text of hopplus_ppo.py or hopplus_mcts.py: what
# stands there once -> what stands there instead

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


# ---------------------------------------------------------------------------------------------------------------------
# Running


def folder_of(args: Args, run: Run) -> Path:
    words = [run.script, run.flags, *(run.before or ()), *run.then, *run.patch, args.extra, args.extra_then]
    name = "".join(c if c.isalnum() else "_" for c in " ".join(words)).strip("_")
    return Path(args.run_dir) / f"{name[:120]}_{zlib.crc32(' '.join(words).encode()):08x}"


def checkpoints_in(folder: Path) -> list[str]:
    return sorted(glob.glob(f"{folder}/*/checkpoint.pt"))


def make(args: Args, run: Run) -> None:
    """The run and what follows it"""
    folder = folder_of(args, run)
    if (folder / "finished").exists():
        return
    trained = (folder / "seconds").exists()
    begun = checkpoints_in(folder) if trained or run.script != GRU else []  # the baseline saves only at the end
    if not begun:
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
        folder.mkdir(parents=True)
    fixed = [] if run.script == GRU else ["--save-seconds", "120"]

    def call(log: str, *command: str) -> None:
        with open(folder / f"{log}.log", "a") as file:
            subprocess.run([sys.executable, *command], cwd=ROOT, stdout=file, stderr=file, check=True)

    flags = [*run.flags.split(), *fixed, *args.extra.split(), "--run-dir", str(folder.resolve())]
    if begun:
        flags = ["--resume", begun[0]]
    elif run.before:
        script, script_flags, flag = run.before
        there = folder.resolve() / "before"
        call("before", script, *script_flags.split(), *args.extra.split(), "--run-dir", str(there))
        flags += [flag, checkpoints_in(there)[0]]
    started = time.time()
    patched = ["benchmarks/experiments.py", "--patched", *run.patch, "--script", run.script, "--"]
    script = patched if run.patch else [run.script]
    if not trained:
        call("train", *script, *flags)
        (folder / "seconds").write_text(f"{time.time() - started:.1f}")
    for number, then in enumerate(run.then):
        if (folder / f"then_{number}.done").exists():  # of an attempt that was cut off later
            continue
        found = checkpoints_in(folder)
        words = then.replace("RUNS", " ".join(found)).replace("RUN", found[0])
        words, dashes, of_script = words.partition(" -- ")
        call(f"then_{number}", *f"{words} {args.extra_then}{dashes}{of_script}".split())
        (folder / f"then_{number}.done").touch()
    for path in checkpoints_in(folder):
        Path(path).unlink()
    (folder / "finished").touch()


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures_of(row: dict) -> dict[str, float]:
    """What we follow, of one line of metrics.jsonl"""
    found = {name: row[key] for name, key in FOLLOWED.items() if row.get(key) is not None}
    if "moa/nll" in row:
        found["moa_gap"] = row["moa/nll"] - row["moa/ceiling/nll"]
    return found


def figures_before(folder: Path) -> list[dict[str, float]]:
    """What the pretraining of each seed found in held-out games"""
    subgoals = [list(csv.DictReader(p.open())) for p in sorted(folder.glob("before/*/evaluation/final.csv"))]
    found = [{row["metric"]: float(row["with history"]) for row in table} for table in subgoals]
    for path in sorted(folder.glob("before/*/evaluation.csv")):  # of the world model: all seeds in one
        table = list(csv.DictReader(path.open()))
        seeds = [name for name in table[0] if name.startswith("seed_")]
        found = [{row["metric"]: float(row[seed]) for row in table} for seed in seeds]
    names = ("probe_accuracy", "top1", "nll", "exact_match/1", "exact_match/20", "obs_mse", "reward_mse")
    return [{key: figures[key] for key in names if key in figures} for figures in found]


def device_of(log: str) -> str:
    return "cuda" if re.search(r" on (\d+ x )?cuda", log) else "cpu"


def collect(args: Args, number: str) -> None:
    """docs/data/section_NUMBER*.csv from the folders of the runs"""
    _, runs, panels = SECTIONS[number]
    followed = ["return", "value_real"]
    summaries, curves, met, repeated, meeting, crossed, together = [], [], [], [], [], [], []
    for label, run in runs.items():
        folder = folder_of(args, run)
        if not (folder / "seconds").exists():  # not trained to the end
            continue
        before, device = figures_before(folder), device_of((folder / "train.log").read_text())
        paths = sorted(glob.glob(f"{folder}/*/metrics.jsonl"))
        for seed, path in enumerate(paths):
            lines = read_lines(Path(path))
            if not lines:
                continue
            found = [figures_of(line) for line in lines]
            last = found[-max(1, len(found) // 5) :]
            row = {"run": label, "seed": seed, "device": device, "flags": f"{run.script} {run.flags}"}
            row["steps"] = lines[-1]["steps"]
            row |= {key: np.mean([f[key] for f in last if key in f]) for key in last[-1]}
            fifths = [
                np.mean([f.get("return", 0.0) for f in part]) for part in np.array_split(found, min(5, len(found)))
            ]
            row["fall"] = max(fifths) - fifths[-1]
            for goal in (2.7, 2.8, 2.85, 4.5):
                hit = next((k for k, f in enumerate(found) if f.get("return", 0) >= goal), None)
                row[f"steps_to_{goal}"] = "" if hit is None else lines[hit]["steps"]
                row[f"seconds_to_{goal}"] = "" if hit is None else lines[hit].get("time/training", "")
            row |= {f"before/{key}": value for key, value in (before[seed].items() if before else ())}
            row |= {key: value for key, value in lines[-1].items() if key.startswith("time/")}
            summaries.append(row)
            for k in sorted(set(np.linspace(0, len(found) - 1, 40).astype(int))):
                kept = {key: found[k].get(key, "") for key in followed}
                curves.append({"run": label, "seed": seed, "steps": lines[k]["steps"], **kept})
        for sets in (key for kind, key in panels if kind == "adaptation"):
            for name, rows in (("", met), ("_repetitions", repeated), ("_curve", meeting)):
                for path in folder.glob(f"*/adaptation_{sets}{name}.csv"):
                    rows += [{"run": label, "sets": sets, **row} for row in csv.DictReader(path.open())]
        for path in folder.glob("*/partners*.csv"):
            population = path.stem.removeprefix("partners").lstrip("_")
            together += [{"run": label, "population": population, **row} for row in csv.DictReader(path.open())]
        for path in folder.glob("*/cross_play.csv"):
            for focal, row in enumerate(csv.reader(path.open()), -1):  # the first line is the header
                found = enumerate(row[1:]) if focal >= 0 else ()
                crossed += [{"run": label, "focal": focal, "others": k, "return": value} for k, value in found]
    meeting = [row | {"return": float(row["return"])} for row in meeting]
    tables = {
        "": summaries,
        "_curves": curves,
        "_adaptation": met,
        "_adaptation_repetitions": repeated,
        "_adaptation_curves": meeting,
        "_cross_play": crossed,
        "_together": together,
    }
    for name, rows in tables.items():
        fresh = {row["run"] for row in rows}
        rows = rows + [row for row in read(args, number, name) if row["run"] not in fresh]  # what ran elsewhere stays
        rows = sorted((row for row in rows if row["run"] in runs), key=lambda row: list(runs).index(row["run"]))
        if rows:
            write(Path(args.docs) / "data" / f"section_{number}{name}.csv", rows)


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


# ---------------------------------------------------------------------------------------------------------------------
# Tables and figures, from docs/data alone


def read(args: Args, number: str, name: str = "") -> list[dict]:
    path = Path(args.docs) / "data" / f"section_{number}{name}.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def interval(values: list[float]) -> tuple[float, float, float]:
    """mean and its 95 % interval (Student's t)"""
    values = np.asarray(values, np.float64)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else math.nan
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def paired(rows: list[dict], run: str, base: str, key: str = "return") -> tuple[float, float, float] | None:
    """mean difference of two runs in the same seeds, and its 95 % interval"""
    found = [
        {row["seed"]: float(row[key]) for row in rows if row["run"] == name and row.get(key)} for name in (run, base)
    ]
    seeds = found[0].keys() & found[1].keys()
    return interval([found[0][seed] - found[1][seed] for seed in seeds]) if seeds else None


def by_run(rows: list[dict], key: str) -> dict[str, list[float]]:
    found = {}
    for row in rows:
        found.setdefault(row["run"], [])
        if row.get(key):
            found[row["run"]].append(float(row[key]))
    return {run: values for run, values in found.items() if values}


def numbered(rows: list[dict]) -> dict[str, int]:
    """run -> its number in the section, so that it has the same colour in every panel"""
    return {row["run"]: row["number"] for row in rows}


def line_style(number: int) -> dict:
    """Eight colours, then the same dashed"""
    return {"color": f"C{number % 8}", "ls": "-" if number < 8 else "--"}


def heat_map(axis, table: np.ndarray, low: float, high: float) -> None:
    """Numbers in coloured cells, dark ones in white"""
    axis.imshow(table, vmin=low, vmax=high, aspect="auto")
    axis.grid(visible=False)
    for (y, x), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if value > low + 0.6 * (high - low) else "black"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)


def bars(axis, rows: list[dict], key: str) -> None:
    found = by_run(rows, key)
    for y, values in enumerate(found.values()):
        mean, low, high = interval(values)
        axis.barh(y, mean, color="C5")
        axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color="black", capsize=3)
        axis.plot(values, [y] * len(values), ".", color="black", alpha=0.4, markersize=4)
    means = [np.mean(values) for values in found.values()]
    if key.startswith("steps") and max(means) > 20 * min(means):
        axis.set_xscale("log")
    axis.set(title=TITLES.get(key, key))
    axis.set_yticks(range(len(found)), found)
    axis.grid(axis="y", visible=False)
    axis.invert_yaxis()


def points(axis, rows: list[dict], key: str) -> None:
    """Means and intervals, where bars from zero on would all look alike"""
    found = by_run(rows, key)
    for y, values in enumerate(found.values()):
        mean, low, high = interval(values)
        axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color=f"C{y}", fmt="o", capsize=4)
        axis.plot(values, [y + 0.2] * len(values), ".", color=f"C{y}", alpha=0.4, markersize=4)
    axis.set_yticks(range(len(found)), found)
    axis.set(title=f"{key} at the end")
    axis.grid(axis="y", visible=False)
    axis.invert_yaxis()


def late_curves(axis, rows: list[dict], key: str) -> None:
    """The upper quarter, where the runs differ"""
    curves(axis, rows, key)
    top = max(float(row[key]) for row in rows if row.get(key))
    axis.set_ylim(0.75 * top, 1.01 * top)


def curves(axis, rows: list[dict], key: str) -> None:
    for run, number in numbered(rows).items():
        own = [row for row in rows if row["run"] == run and row.get(key)]
        steps = sorted({int(row["steps"]) for row in own})
        means = [np.mean([float(row[key]) for row in own if int(row["steps"]) == s]) for s in steps]
        axis.plot(steps, means, label=run, **line_style(number))
    axis.set(xlabel="env steps", title=TITLES.get(key, key))
    axis.legend()


def by_return(rows: list[dict], key: str) -> dict[str, list[float]]:
    """run -> mean of `key` over the log lines whose return lies between two of RETURNS"""
    found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [
            (float(row["return"]), float(row[key])) for row in rows if row["run"] == run and row["return"] and row[key]
        ]
        bins = [[y for x, y in own if low <= x < high] for low, high in itertools.pairwise(RETURNS)]
        found[run] = [float(np.mean(values)) if values else math.nan for values in bins]
    return found


def against(axis, rows: list[dict], key: str) -> None:
    middle = [(low + high) / 2 for low, high in itertools.pairwise(RETURNS)]
    for run, values in by_return(rows, key).items():
        axis.plot(middle, values, label=run, marker=".", **line_style(numbered(rows)[run]))
    axis.set(xlabel="return at that time", title=TITLES.get(key, key))
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def recalls(axis, rows: list[dict], _: str) -> None:
    """recall over training, a row for each run and action; the four moves are averaged"""
    runs, parts = list(dict.fromkeys(row["run"] for row in rows)), []
    shown = {"a move": RECALLS[:4]} | {ACTION_NAMES[a]: RECALLS[a : a + 1] for a in range(4, NUM_ACTIONS)}
    for run in runs:
        own = [row for row in rows if row["run"] == run]
        bins = np.array_split(sorted({int(row["steps"]) for row in own}), 12)
        for keys in shown.values():
            found = [(int(row["steps"]), float(row[key])) for row in own for key in keys if row.get(key)]
            parts.append([np.mean([v for s, v in found if s in b] or np.nan) for b in map(set, bins)])
    image = axis.imshow(parts, vmin=0, vmax=1, aspect="auto")
    axis.figure.colorbar(image, ax=axis)
    axis.set(title="recall by action, over training", xticks=[], xlabel="training")
    axis.grid(visible=False)
    axis.set_yticks(
        range(len(parts)), [f"{run}: {name}" if name == "a move" else name for run in runs for name in shown]
    )


def meeting(axis, rows: list[dict], players: str) -> None:
    """return while it meets the same co-players"""
    for run, number in numbered(rows).items():
        own = [
            row for row in rows if row["run"] == run and row["co_players"] == players and row["learner"] == "learning"
        ]
        axis.plot(
            [int(row["steps"]) for row in own],
            [float(row["return"]) for row in own],
            label=run,
            **line_style(number),
        )
    axis.set(xlabel="env steps with them", title=f"return beside {players}, learning")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def seats(axis, rows: list[dict], key: str) -> None:
    """Return (key: player) or MOA's cross-entropy (moa_nll) of the learner in each seat"""
    runs = list(by_run(rows, f"{key}_3"))  # not those in which all share one learner
    for i in range(4):
        found = by_run(rows, f"{key}_{i}")
        means = np.array([interval(found[run]) for run in runs])  # [runs, (mean, low, high)]
        spread = np.abs(means[:, 1:] - means[:, :1]).T
        axis.errorbar(
            means[:, 0], np.arange(len(runs)) + 0.15 * i, xerr=spread, fmt="o", capsize=3, label=f"seat {i + 1}"
        )
    axis.set(yticks=np.arange(len(runs)) + 0.22, title=f"{TITLES.get(key, 'return')} by seat")
    axis.set_yticklabels(runs)
    axis.invert_yaxis()
    axis.legend()


def together(axis, rows: list[dict], _: str) -> None:
    """By how many games the learner and its partner have played with each other"""
    rows = [row for row in rows if not row["population"]]  # the partners of the training
    for run, number in numbered(rows).items():
        for key, style in (("return", "-"), ("shuffled", ":")):
            own = [row for row in rows if row["run"] == run and row.get(key)]
            games = sorted({int(row["game"]) for row in own})
            means = [np.mean([float(row[key]) for row in own if int(row["game"]) == k]) for k in games]
            axis.plot(games, means, style, color=f"C{number}", label=run if key == "return" else None)
    axis.set(xlabel="game together (dotted: subgoals of other games)", title="return, frozen", xticks=range(2, 21, 2))
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def steps_to(rows: list[dict], run: str, goal: float) -> list[float]:
    """Steps that each seed needs to a return of `goal`; infinity where it never has it"""
    found = {}
    for row in rows:
        if row["run"] == run and row.get("return"):
            reached = float(row["return"]) >= goal
            found[row["seed"]] = min(found.get(row["seed"], math.inf), float(row["steps"]) if reached else math.inf)
    return list(found.values())


def print_ladder(args: Args, number: str) -> None:
    """What knowing is worth: paired differences to `none`, and as a share of what the exact posterior gains"""
    rows, curves = read(args, number), read(args, number, "_curves")
    if "none" not in by_run(rows, "return"):  # --only others
        return
    best = interval(by_run(rows, "return")["none"])[0]
    print("\n| arm | return | gain over none | of the posterior's gain | against the GRU | M steps to 95 % of none |")
    print("|---|---|---|---|---|---|")
    for run in dict.fromkeys(row["run"] for row in rows):
        gain, posterior, gru = (paired(rows, run, "none"), paired(rows, "posterior", "none"), paired(rows, run, "GRU"))
        share = f"{gain[0] / posterior[0]:.0%}" if posterior and posterior[0] > 0.05 else ""
        steps = np.median(steps_to(curves, run, 0.95 * best)) / 1e6
        cells = [plus_minus(found) if found else "" for found in (interval(by_run(rows, "return")[run]), gain)]
        print(f"| {run} | {' | '.join(cells)} | {share} | {plus_minus(gru) if gru else ''} | {steps:.2f} |")


def print_together(args: Args, number: str) -> None:
    """What is earned in the first games with a partner and later on; then with subgoals of other games, then with
    partners that nobody met in training"""
    rows = read(args, number, "_together")
    if not rows:
        return
    columns = {f"game {k}": ("", "return", (k,)) for k in (1, 2, 3)}
    columns["games 11-20"] = "", "return", range(11, 21)
    columns["shuffled, 11-20"] = "", "shuffled", range(11, 21)
    columns["new partners, 11-20"] = "nearest_stag", "return", range(11, 21)
    print(f"\n| arm, frozen | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for run in dict.fromkeys(row["run"] for row in rows):
        cells = []
        for population, key, games in columns.values():
            found = {}
            for row in rows:
                if (row["run"], row["population"]) == (run, population) and int(row["game"]) in games and row.get(key):
                    found.setdefault(row["seed"], []).append(float(row[key]))
            cells.append(plus_minus(interval([np.mean(values) for values in found.values()])) if found else "")
        print(f"| {run} | {' | '.join(cells)} |")


def plus_minus(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.3f} ± {found[2] - found[0]:.3f}"


def seat_test(rows: list[dict], run: str, draws: int = 20_000, key: str = "player") -> tuple[np.ndarray, float]:
    """mean return (or another key) of each seat, and p of a permutation test: seats exchanged within each seed,
    variance of the four means"""
    table = np.array(
        [[float(row[f"{key}_{i}"]) for i in range(4)] for row in rows if row["run"] == run]
    )  # [seeds, seats]
    order = np.random.default_rng(0).random((draws, *table.shape)).argsort(2)
    shuffled = np.take_along_axis(np.broadcast_to(table, order.shape), order, 2).mean(1).var(1)
    return table.mean(0), float((shuffled >= table.mean(0).var() - 1e-12).mean())


def normalised(rows: list[dict], references: list[dict], sets: str) -> dict[str, dict[str, float]]:
    """run and mode -> co-players -> score; random 0, best response 1 (of the run that measured
    them on this board, as the Bayes hunter)"""
    found = {}
    best = {(r["co_players"], "8x8" in r["run"]): (float(r["random mean"]), float(r["best response mean"]))
            for r in references if r.get("best response mean")}  # fmt: skip
    for row in (row for row in rows if row["sets"] == sets):
        low, high = best.get((row["co_players"], "8x8" in row["run"]), (math.nan, math.nan))
        for mode in ("Bayes hunter", "frozen", "search", "unguarded", "learning", "both"):
            if row.get(f"{mode} mean"):
                score = (float(row[f"{mode} mean"]) - low) / (high - low)
                label = f"{row['run']}, {mode}"
                if mode == "Bayes hunter":
                    label = "Bayes hunter, 8x8" if "8x8" in row["run"] else "Bayes hunter"
                found.setdefault(label, {})[row["co_players"]] = score
    return found


COMPARED = {  # section: run, mode of evaluation/adapt.py, and from which run's and mode's return it differs
    "7": [
        ("HOP+", "learning", "PPO, mixed", "learning"),
        ("HOP+, 8x8", "learning", "PPO, mixed, 8x8", "learning"),
        ("HOP+, 8x8", "learning", "HOP+, 8x8", "frozen"),
        ("HOP+", "search", "HOP+", "frozen"),
        ("HOP+, 8x8", "search", "HOP+, 8x8", "frozen"),
        ("HOP+ MCTS", "search", "HOP+ MCTS", "frozen"),
        *(("HOP+", mode, f"HOP+, {less}", mode)
          for less in ("no memory", "policy without subgoals") for mode in ("frozen", "learning")),
    ],
}  # fmt: skip


def print_differences(args: Args, number: str) -> None:
    """What one learner earns more than another beside the same players, seed by seed"""
    rows = read(args, number, "_adaptation_repetitions")
    for run, mode, base, base_mode in COMPARED.get(number, ()):
        returns = {}  # of each set, learner and seed, in all its repetitions
        for row in rows:
            for name, key in ((run, mode), (base, base_mode)):
                if row["run"] == name and row.get(key):
                    label = row["co_players"], f"{name} {key}", row["seed"]
                    returns.setdefault(label, []).append(float(row[key]))
        means = [(*label, np.mean(values)) for label, values in returns.items()]
        found = {}
        for players in dict.fromkeys(label[0] for label in means):
            table = [{"run": m[1], "seed": m[2], "return": m[3]} for m in means if m[0] == players]
            difference = paired(table, f"{run} {mode}", f"{base} {base_mode}")
            if difference is not None:
                found[players] = plus_minus(difference)
        if found:
            print(f"{run} {mode} minus {base} {base_mode}: " + ", ".join(f"{k} {v}" for k, v in found.items()))


def adaptation(axis, found: dict[str, dict[str, float]], _: str) -> None:
    players = list(dict.fromkeys(p for row in found.values() for p in row))
    table = np.array([[row.get(p, np.nan) for p in players] for row in found.values()])
    if not table.size:
        axis.set_axis_off()
        return
    heat_map(axis, table, 0, 1)
    axis.set(xticks=range(len(players)), yticks=range(len(found)), title="score: random 0, best response 1")
    axis.set_xticklabels(players, rotation=35, ha="right")
    axis.set_yticklabels(found)


def draw(args: Args, number: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(STYLE)
    title, _, panels = SECTIONS[number]
    rows = read(args, number)
    if not rows:
        print(f"section {number}: no data yet")
        return
    sources = {"bars": "", "seats": "", "curves": "_curves", "recalls": "_curves", "adaptation": "_adaptation"}
    sources |= {"against": "_curves", "meeting": "_adaptation_curves"}
    sources |= {"together": "_together", "points": "", "late curves": "_curves"}
    draws = {"bars": bars, "seats": seats, "curves": curves, "recalls": recalls, "adaptation": adaptation}
    draws |= {"against": against, "meeting": meeting, "together": together}
    draws |= {"points": points, "late curves": late_curves}
    needs = {"bars": "{}", "seats": "{}_3", "recalls": "recall/0"}  # what a panel draws; not every table has it
    drawn = []
    for kind, key in panels:
        source = read(args, number, sources[kind])
        if source and (kind not in needs or by_run(source, needs[kind].format(key))):
            drawn.append((kind, key))
    panels = drawn
    met, references = read(args, number, "_adaptation"), [row for k in "78" for row in read(args, k, "_adaptation")]
    scores = {sets: normalised(met, references, sets) for sets in ("standard", "strangers")}
    count = len({row["run"] for row in rows})
    lines = {"adaptation": max(map(len, scores.values())), "recalls": 3 * count, "seats": 1.5 * count, "meeting": 8}
    heights = [max(3.6, 1.6 + 0.22 * lines.get(kind, count)) for kind, _ in panels]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    heights = [max(heights[k : k + columns]) for k in range(0, len(heights), columns)]
    figure, axes = plt.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    figure.set_size_inches(5.6 * columns, sum(heights))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    order = list(dict.fromkeys(row["run"] for row in rows))
    for axis, (kind, key) in zip(axes.flat, panels, strict=False):
        table = [row | {"number": order.index(row["run"])} for row in read(args, number, sources[kind])]
        draws[kind](axis, scores[key] if kind == "adaptation" else table, key)
    figure.tight_layout()
    figure.suptitle(title if number in TASKS else f"{number}. {title}", y=1, verticalalignment="bottom")
    path = Path(args.docs) / "results" / f"section_{number}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    keys = ["return", *dict.fromkeys(key for kind, key in panels if kind == "bars" and key != "return")]
    print(f"\n## {number}. {title}\n\n| run | seeds | {' | '.join(keys)} |\n|{'---|' * (len(keys) + 2)}")
    for run in dict.fromkeys(row["run"] for row in rows):
        cells = []
        for key in keys:
            values = by_run(rows, key).get(run)
            count = sum(row["run"] == run for row in rows)
            mean, low, high = interval(values) if values else (float("nan"),) * 3
            short = f" ({len(values or [])} of {count} seeds)" if len(values or []) < count else ""
            cells.append(
                f"{mean:.4g} [{low:.4g}, {high:.4g}]{short}" if values else "never" if "steps_to" in key else ""
            )
        print(f"| {run} | {count} | {' | '.join(cells)} |")
    for key in (key for kind, key in panels if kind == "seats"):
        for run in by_run(rows, f"{key}_3"):
            means, p = seat_test(rows, run, key=key)
            print(f"{run}: {key} by seat " + ", ".join(f"{mean:.3f}" for mean in means) + f"; all equal: p = {p:.2g}")
    if number in TASKS:
        print_ladder(args, number)
        print_together(args, number)
    for key in (key for kind, key in panels if kind == "against"):
        for run, values in by_return(read(args, number, "_curves"), key).items():
            print(f"{run}: {key} at returns between {RETURNS}: " + ", ".join(f"{value:.2f}" for value in values))
    for found in scores.values():
        for run, row in found.items():
            print(f"{run}: " + ", ".join(f"{players} {value:.3f}" for players, value in row.items()))
    print_differences(args, number)


def main_patched(args: Args) -> None:
    for name in args.patched:
        refuse(name not in PATCHES, f"--patched {name}: the known ones are {', '.join(PATCHES)}")
    script = patched_script(args.script, {name: PATCHES[name] for name in args.patched})
    script.main(script.parse_args(list(args.words)))


def main(args: Args) -> None:
    if args.patched:
        main_patched(args)
        return
    if args.list:
        for number, (title, runs, _) in SECTIONS.items():
            print(f"{number}. {title}")
            for label, run in runs.items():
                print(f"     {label}: {run.script} {run.flags}" + (f" [{', '.join(run.patch)}]" if run.patch else ""))
        return
    wrong = [n for n in args.section if n not in SECTIONS]
    if wrong:
        raise UserError(f"there is no section {wrong[0]}: {', '.join(SECTIONS)}")
    known = [label for n in args.section for label in SECTIONS[n][1]]
    unknown = [label for label in args.only if label not in known]
    if unknown:
        raise UserError(f"--only {unknown[0]}: the runs of these sections are {', '.join(known)}")
    if not args.draw:
        runs = [
            run for n in args.section for label, run in SECTIONS[n][1].items() if not args.only or label in args.only
        ]
        begun = time.time()
        with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
            longest_first = sorted(dict.fromkeys(runs), key=lambda run: -len(run.then))
            jobs = {pool.submit(make, args, run): run for run in longest_first}
            for count, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                state = "FAILED, see its logs" if job.exception() else "done"
                print(
                    f"{time.time() - begun:.0f} s, {count} of {len(jobs)}: {state}: {folder_of(args, jobs[job]).name}",
                    flush=True,
                )
        for number in args.section:
            collect(args, number)
    for number in args.section:
        draw(args, number)


def parse_args(words: list[str]) -> Args:
    at = words.index("--") if "--" in words else len(words)
    args = parse(Args, {"experiments": ExperimentArgs}, Args(), words[:at])
    return dataclasses.replace(args, words=tuple(words[at + 1 :]))


if __name__ == "__main__":
    command_line(parse_args, main)
