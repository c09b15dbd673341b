"""Runs the experiments that answer the project's questions on one GPU, and draws their figures.

    python benchmarks/experiments.py --list
    python benchmarks/experiments.py --section stays-8x8 --parallel 6     # a step of the ladder
    python benchmarks/experiments.py --section others --parallel 5    # learners to be met in 7 and 8
    python benchmarks/experiments.py --section 7 8 --parallel 4
    python benchmarks/experiments.py --section worst     # the worst case in 7 and 8
    python benchmarks/experiments.py --draw        # only tables and figures, from docs/data
    python benchmarks/experiments.py --patched one_player -- --method ppo     # with a mistake
    python benchmarks/experiments.py --patched moa_of_player_1 --script hopplus_mcts.py -- --num-seeds 5

A run that is finished is not made again (its folder in --run-dir has a file `finished`), and one that was cut off goes
on from its last checkpoint; sections share runs. HOP+ is hopplus_ppo.py with its defaults everywhere: only the board,
the games at once, the steps and the seeds differ.

The ladder: games in which it pays more and more to know the others. Settings were chosen with seeds 1 to 5
(docs/data/tuning.csv) and are tested with seeds from 11 on; differences are paired by seed, intervals are Student's t.
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
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import UserError, command_line, parse, refuse

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
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

PPO = "hopplus_ppo.py"
MCTS = "hopplus_mcts.py"
GRU = "benchmarks/baselines/ppo_gru.py"

# ----------------------------------------------------------------------------------------
# Runs


@dataclasses.dataclass(frozen=True)
class Run:
    flags: str
    script: str = PPO
    then: tuple[str, ...] = ()  # commands for its checkpoints, see `resolve`
    before: tuple[str, str, str] | None = None  # script, flags, and the flag that takes its checkpoint
    patch: tuple[str, ...] = ()  # edits of the script, see PATCHES
    keep: bool = False  # the checkpoints stay, for what follows other runs


@dataclasses.dataclass(frozen=True)
class Method:
    script: str
    games: int
    steps: int
    flags: str = ""


class Section(NamedTuple):
    title: str
    runs: dict[str, Run]
    panels: list[tuple[str, str]]  # kind, key


# ---- Learners that meet others: sections 7, 8 and worst

TEST_SEEDS = "--seed 11 --num-seeds 5"
BOARDS = {"4x4": "", "8x8": "--height 8 --width 8"}
# The policy itself trains with the players that models watch. Who has a memory keeps its co-players.
MIXED = "--seats learner,mixed,mixed,mixed"
MIXED_GRU = f"{MIXED} --population random,nearest_stag,nearest_hare --redraw never"
MIXED_OMG = f"--method ppo-omg {MIXED} --redraw never"
FAST = "--learning-rate 1e-3"  # alone with rule-based players
SLOW = "--learning-rate 3e-4"
METHODS = {
    "4x4": {
        "PPO": Method(PPO, 1024, 4_000_000, "--method ppo"),
        "PPO, mixed": Method(PPO, 1024, 5_000_000, f"--method ppo {FAST} {MIXED}"),
        "GRU, mixed": Method(GRU, 1024, 5_000_000, MIXED_GRU),
        "+ subgoals, mixed": Method(PPO, 1024, 5_000_000, f"{MIXED_OMG} {FAST}"),
        "HOP+": Method(PPO, 256, 2_000_000),
    },
    "8x8": {
        "PPO": Method(PPO, 1024, 4_000_000, "--method ppo"),
        "PPO, mixed": Method(PPO, 1024, 8_000_000, f"--method ppo {SLOW} {MIXED}"),
        "GRU, mixed": Method(GRU, 1024, 8_000_000, MIXED_GRU),
        "+ subgoals, mixed": Method(PPO, 1024, 8_000_000, f"{MIXED_OMG} {SLOW}"),
        "HOP+": Method(PPO, 256, 2_000_000),
    },
}
SELF_PLAY = ("PPO", "HOP+")
# Learners that those of METHODS meet. One learned beside hare hunters to hunt hares, one has just begun.
OTHER_SEEDS = "--seed 31 --num-seeds 2"
WITH_HARE_HUNTERS = "--seats learner,nearest_hare,nearest_hare,nearest_hare"


def other_methods(board: str, hare_steps: int, early: Method) -> dict[str, Method]:
    return {
        "PPO": METHODS[board]["PPO"],
        "HOP+": METHODS[board]["HOP+"],
        "hares": Method(PPO, 1024, hare_steps, f"--method ppo {FAST} {WITH_HARE_HUNTERS}"),
        "early": early,
        "GRU": Method(GRU, 1024, 3_000_000, MIXED_GRU),
    }


OTHERS = {
    "4x4": other_methods("4x4", 1_000_000, Method(PPO, 1024, 600_000, f"--method ppo {FAST}")),
    "8x8": other_methods("8x8", 2_000_000, Method(PPO, 1024, 1_200_000, f"--method ppo {SLOW}")),
}
ADAPT = "evaluation/adapt.py RUN --no-references --modes frozen learning"
SEARCH_ADAPT = "evaluation/adapt.py RUN --no-references --modes frozen search learning"
BEST = "evaluation/adapt.py RUN --best-response-steps 8000000 --modes frozen learning"
CROSS = "evaluation/cross_play.py RUN"


def label_of(method: str, board: str) -> str:
    """The name in tables: of the larger board it says so"""
    return method if board == "4x4" else f"{method}, {board}"


def board_of(label: str) -> str:
    return "8x8" if label.endswith("8x8") else "4x4"


def method_of(label: str) -> str:
    return label.removesuffix(", 8x8")


def method_flags(method: Method, board: str, seeds: str) -> str:
    size = f"--num-envs {method.games} --total-timesteps {method.steps}"
    return " ".join(f"{seeds} --log-every 5 {BOARDS[board]} {size} {method.flags}".split())


def meetings(method: str, board: str) -> tuple[str, ...]:
    """What follows its training. The references of a board are measured beside its PPO."""
    command = BEST if method == "PPO" else ADAPT
    strangers = f"{command} --sets strangers"
    learned = f"{command} --sets learned --others OTHERS_{board}"
    if method in SELF_PLAY:
        return command, strangers, learned, CROSS
    return command, strangers, learned


def method_runs() -> dict[str, Run]:
    runs = {}
    for board, methods in METHODS.items():
        for name, method in methods.items():
            flags = method_flags(method, board, TEST_SEEDS)
            runs[label_of(name, board)] = Run(flags, method.script, then=meetings(name, board))
    return runs


def other_runs(board: str) -> dict[str, Run]:
    """name -> run. The GRU has a checkpoint for each seed, of which one is met."""
    runs = {}
    for name, method in OTHERS[board].items():
        seeds = "--seed 31 --num-seeds 1" if method.script == GRU else OTHER_SEEDS
        runs[name] = Run(method_flags(method, board, seeds), method.script, keep=True)
    return runs


MEETING_RUNS = method_runs()
OTHER_RUNS = {label_of(name, board): run for board in BOARDS for name, run in other_runs(board).items()}

# ---- The ladder: one learner, whose partner is one of three; the others hunt hares

# Flags of every arm
LADDER = f"{TEST_SEEDS} --num-envs 1024 --learning-rate 1e-3 --ent-coef 0.01 --log-every 5"
ARMS = {  # what the policy may know: script and flags
    "none": (PPO, "--method ppo"),
    "actions": (PPO, "--method ppo-omg --subgoals actions"),
    "inferred": (PPO, "--method ppo-omg --subgoals inferred"),
    "GRU": (GRU, ""),
    "posterior": (PPO, "--method ppo-omg --subgoals posterior"),
    "told": (PPO, "--method ppo-omg --subgoals oracle"),
}
HOPPLUS_TASKS = ("stays-8x8", "stays-4x4", "redrawn-4x4")  # where HOP+ is an arm, too
HOPPLUS_STEPS = 2_000_000
PARTNERS = "evaluation/partners.py RUN"
STRANGE_PARTNERS = ("nearest_stag", "left_stag")  # whom nobody met in training
LEARNING_ARMS = ("none", "GRU", "HOP+")  # also as they go on learning beside such a partner
HIDDEN = "--num-stags 2 --population first_stag,last_stag,nearest_hare"
ONE = f"{HIDDEN} --seats learner,mixed,nearest_hare,nearest_hare"
LARGE = BOARDS["8x8"]


class Task(NamedTuple):
    title: str
    flags: str
    steps: int


TASKS = {
    "stays-8x8": Task(
        "8x8, 9 steps, the partner stays",
        f"{LARGE} --final-time 9 --redraw never {ONE}",
        8_000_000,
    ),
    "stays-4x4": Task(
        "4x4, 5 steps, the partner stays",
        f"--final-time 5 --redraw never {ONE}",
        5_000_000,
    ),
    "redrawn-8x8": Task(
        "8x8, 9 steps, a new partner in every game",
        f"{LARGE} --final-time 9 --redraw game {ONE}",
        8_000_000,
    ),
    "redrawn-4x4": Task(
        "4x4, 5 steps, a new partner in every game",
        f"--final-time 5 --redraw game {ONE}",
        5_000_000,
    ),
    "drifts-4x4": Task(
        "4x4, 5 steps, a new partner after one game in ten",
        f"--final-time 5 --redraw 0.1 {ONE}",
        5_000_000,
    ),
    "two-partners-4x4": Task(
        "4x4, 5 steps, two partners stay",
        f"--final-time 5 --redraw never {HIDDEN} --seats learner,mixed,mixed,nearest_hare",
        5_000_000,
    ),
    "commitment": Task(
        "4x4, the game ends with the first hunt",
        f"--steps-after-first-hunt 1 --population nearest_stag,nearest_hare --redraw never {MIXED}",
        5_000_000,
    ),
    "control-long": Task(
        "8x8, 35 steps, a new partner in every game",
        f"{LARGE} --final-time 35 --redraw game {ONE}",
        8_000_000,
    ),
    "control-known": Task(
        "4x4, 5 steps, the partner is always the same",
        "--num-stags 2 --final-time 5 --population first_stag --redraw never"
        " --seats learner,mixed,nearest_hare,nearest_hare",
        5_000_000,
    ),
}


def partner_commands(task: str, arm: str) -> tuple[str, ...]:
    """Games with the partners of the training; where these stay, also with partners of a new kind"""
    if "drifts" in task:
        return (PARTNERS,)
    if "stays" not in task:
        return ()
    modes = "frozen learning" if arm in LEARNING_ARMS else "frozen"
    strange = (f"{PARTNERS} --population {name} --modes {modes}" for name in STRANGE_PARTNERS)
    return PARTNERS, *strange


def arms(task: str) -> dict[str, Run]:
    """What the policy may know, in one game"""
    game_flags = TASKS[task].flags
    names = tuple(ARMS)
    if "4x4" not in task and "stays" not in task:
        names = ("none", "inferred", "told")
    runs = {}
    for name in names:
        script, flags = ARMS[name]
        flags = f"{LADDER} {game_flags} --total-timesteps {TASKS[task].steps} {flags}".rstrip()
        runs[name] = Run(flags, script, then=partner_commands(task, name))
    if task in HOPPLUS_TASKS:
        flags = f"{TEST_SEEDS} {game_flags} --total-timesteps {HOPPLUS_STEPS}"
        runs["HOP+"] = Run(flags, then=partner_commands(task, "HOP+"))
    return runs


def ladder() -> dict[str, Section]:
    panels = [("points", "return"), ("late curves", "return"), ("together", "")]
    return {name: Section(task.title, arms(name), panels) for name, task in TASKS.items()}


# ---- The other questions


def vae(loss: str) -> tuple[str, str, str]:
    return "pretrain_vae.py", f"--num-seeds 5 --loss {loss}", "--vae-checkpoint"


def world(flags: str) -> tuple[str, str, str]:
    return "pretrain_world_model.py", f"--num-seeds 5 {flags}", "--world-model-checkpoint"


SEEDS5 = "--num-seeds 5 --log-every 2"
SEEDS8 = "--num-seeds 8 --log-every 2"
SHORT = f"{SEEDS5} --total-timesteps 300000"
BRIEF = f"{SEEDS5} --total-timesteps 150000"
QUICK = "--num-envs 256 --learning-rate 5e-4"  # fewest steps of PPO on 4x4; on 8x8 it would end with hares
SUBGOALS = f"{SHORT} --method ppo-omg {QUICK}"
CALM = f"{SHORT} --learning-rate 5e-4"  # with which real samples alone learn to hunt the stag, too
FOR_ACTOR = f"{CALM} --critic-data real"
UNCHECKED = "--trust-exact-match 0"
BADLY = f"{UNCHECKED} --imagination-horizon 32 --gae-lambda 1 --ppo-real-ratio 0.1"
INSIDE = f"{SHORT} {UNCHECKED} --ppo-real-ratio 0.05"
PPO_SEATS = f"{SEEDS8} --method ppo --total-timesteps 600000 {QUICK}"
SEARCH = f"{SEEDS5} --total-timesteps 120000"
SEARCH_LONG = f"{SEEDS5} --total-timesteps 400000"
UNTRAINED = f"{SEEDS8} --total-timesteps 120000 --pretraining-updates 0 --offline-ratio 0 --search-model env"
FEW = f"{TEST_SEEDS} --log-every 2 --total-timesteps 100000 --num-envs 64"
PPO_FEW = f"{TEST_SEEDS} --log-every 2 --total-timesteps 400000 --num-envs 128 --method ppo --learning-rate 5e-4"
TWO_STAGS = f"{TEST_SEEDS} --log-every 2 --total-timesteps 1000000 --num-stags 2"
ABLATED = method_flags(METHODS["4x4"]["HOP+"], "4x4", TEST_SEEDS)
SEARCHES = {
    "HOP+ MCTS": Run(SEARCH, MCTS, then=(SEARCH_ADAPT,)),
    "HOP, search prior 1": Run(f"{SEARCH} --method hop-ours --search-prior 1", MCTS, then=(SEARCH_ADAPT,)),
}

SECTIONS = {
    **ladder(),
    "1": Section(
        "Why was the value loss so high?",
        {
            "real samples only": Run(f"{CALM} --no-imagination"),
            "imagined for the actor": Run(FOR_ACTOR),
            "mixed: for actor and critic": Run(CALM),
            "mixed, Monte Carlo returns": Run(f"{CALM} --gae-lambda 1"),
            "mixed, subgoals zeroed": Run(CALM, patch=("zero_subgoals",)),
            "pixel head, for the actor": Run(FOR_ACTOR, patch=("pixel",)),
            "pixel head, mixed, unchecked": Run(f"{CALM} {UNCHECKED}", patch=("pixel", "unclipped")),
            "default, half as long": Run(BRIEF),
            "all old settings": Run(f"{BRIEF} {BADLY}", patch=("unclipped",)),
            "all old settings, pixel head": Run(
                f"{BRIEF} {BADLY} --pretraining-updates 50",
                patch=("pixel", "unclipped"),
            ),
        },
        [("bars", "value_real"), ("bars", "return"), ("against", "value_real")],
    ),
    "2": Section(
        "Was player 1 favoured?",
        {
            "PPO": Run(PPO_SEATS),
            "PPO, shared": Run(f"{PPO_SEATS} --share-parameters"),
            "PPO, seats permuted": Run(f"{PPO_SEATS} --permute-ids"),
            "HOP+": Run(f"{SEEDS8} --total-timesteps 200000"),
            "HOP+, shared": Run(f"{SEEDS8} --total-timesteps 200000 --share-parameters"),
            "PPO, all learn from player 1": Run(PPO_SEATS, patch=("one_player",)),
            "MCTS, no pretraining": Run(UNTRAINED, MCTS),
            "MCTS, no pretraining, only player 1's MOA learns": Run(UNTRAINED, MCTS, patch=("moa_of_player_1",)),
            "MCTS, no pretraining, actions permuted": Run(UNTRAINED, MCTS, patch=("permuted_actions",)),
        },
        [("seats", "player"), ("seats", "moa_nll"), ("bars", "return")],
    ),
    "3": Section(
        "VAE: reconstruction or action loss?",
        {loss: Run(SUBGOALS, then=(ADAPT,), before=vae(loss)) for loss in ("recon", "moa", "both")},
        [
            ("bars", "before/probe_accuracy"),
            ("bars", "before/top1"),
            ("bars", "return"),
            ("adaptation", "standard"),
        ],
    ),
    "4": Section(
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
        [
            ("bars", "before/exact_match/1"),
            ("bars", "before/exact_match/20"),
            ("bars", "return"),
            ("curves", "return"),
        ],
    ),
    "5": Section(
        "Why did MOA collapse?",
        {
            "present (default)": Run(SHORT),
            "rewarded": Run(SHORT, patch=("rewarded",)),
            "all steps": Run(SHORT, patch=("all_steps",)),
            "present, half as long": Run(BRIEF),
            "present, unmasked": Run(BRIEF, patch=("unmasked",)),
            "all steps, unmasked": Run(BRIEF, patch=("unmasked", "all_steps")),
            "MCTS": SEARCHES["HOP+ MCTS"],
            "MCTS, only player 1's MOA learns": Run(SEARCH, MCTS, patch=("moa_of_player_1",)),
            "MCTS, actions permuted": Run(SEARCH, MCTS, patch=("permuted_actions",)),
            "MCTS, actions permuted, unmasked": Run(SEARCH, MCTS, patch=("unmasked", "permuted_actions")),
            "MCTS, no pretraining": Run(UNTRAINED, MCTS),
            "MCTS, no pretraining, only player 1's MOA learns": Run(UNTRAINED, MCTS, patch=("moa_of_player_1",)),
        },
        [("bars", "moa_top1"), ("bars", "moa_gap"), ("seats", "moa_nll"), ("seats", "player")],
    ),
    "6": Section(
        "Search",
        {
            "pUCT, 16 x 2 (default)": SEARCHES["HOP+ MCTS"],
            "Gumbel": Run(f"{SEARCH} --root gumbel", MCTS),
            "one step": Run(f"{SEARCH} --planner one-step", MCTS),
            "no search": Run(f"{SEARCH} --planner none", MCTS),
            "no search, learning rate 5e-4": Run(f"{SEARCH} --planner none --learning-rate 5e-4", MCTS),
            "4 simulations": Run(f"{SEARCH} --num-simulations 4", MCTS),
            "32 simulations": Run(f"{SEARCH} --num-simulations 32", MCTS),
            "HOP": Run(f"{SEARCH} --method hop-ours", MCTS),
            "HOP, search prior 1": SEARCHES["HOP, search prior 1"],
            "pUCT, long": Run(SEARCH_LONG, MCTS),
            "HOP, long": Run(f"{SEARCH_LONG} --method hop-ours", MCTS),
            "HOP, search prior 1, long": Run(f"{SEARCH_LONG} --method hop-ours --search-prior 1", MCTS),
        },
        [("bars", "steps_to_2.8"), ("bars", "fall"), ("curves", "return")],
    ),
    "7": Section(
        "Which module pays, and where?",
        {
            **MEETING_RUNS,
            **SEARCHES,
            "HOP+, no memory": Run(f"{ABLATED} --memory-discount 0", then=(ADAPT,)),
            "HOP+, policy without subgoals": Run(f"{ABLATED} --subgoals none", then=(ADAPT,)),
            "PPO, few steps": Run(PPO_FEW),
            "HOP+, few steps": Run(FEW),
            "few, discrete goals": Run(f"{FEW} --goal-kind discrete --goal-dim 8"),
            "few, D = 8": Run(f"{FEW} --goal-dim 8"),
            "few, optimistic": Run(f"{FEW} --subgoal-selection optimistic"),
            "few, final": Run(f"{FEW} --subgoal-selection final"),
            "few, no subgoals": Run(f"{FEW} --subgoals none"),
            "PPO, 4h2s": Run(f"{TWO_STAGS} --method ppo {QUICK}"),
            "HOP+, 4h2s": Run(TWO_STAGS),
        },
        [("bars", "steps_to_2.8"), ("adaptation", "standard"), ("meeting", "3 NH")],
    ),
    "others": Section(
        "Learners that those of sections 7 and 8 meet",
        OTHER_RUNS,
        [("bars", "return"), ("bars", "stag"), ("curves", "return")],
    ),
    "8": Section(
        "How well does a learner adapt to players nobody trained with?",
        MEETING_RUNS,
        [
            ("adaptation", "strangers"),
            ("adaptation", "learned"),
            ("meeting", "3 waiting"),
            ("meeting", "3 noisy NH"),
        ],
    ),
    # Without runs of their own, from the tables of other sections: see SUMMARIES.
    "worst": Section("The worst case, from sections 7 and 8", {}, []),
    "new-partner": Section("A partner of a new kind, where the partner stays", {}, []),
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


# ----------------------------------------------------------------------------------------
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


# ----------------------------------------------------------------------------------------
# Running


def folder_of(args: Args, run: Run) -> Path:
    words = [run.script, run.flags, *(run.before or ()), *run.then, *run.patch, args.extra, args.extra_then]
    text = " ".join(words)
    name = "".join(c if c.isalnum() else "_" for c in text).strip("_")
    return Path(args.run_dir).resolve() / f"{name[:120]}_{zlib.crc32(text.encode()):08x}"


def checkpoints_in(folder: Path) -> list[str]:
    """One, or with ppo_gru.py one for each seed"""
    return sorted(glob.glob(f"{folder}/*/checkpoint.pt"))


def named_others(args: Args, board: str) -> list[str]:
    """NAME=checkpoint of the finished runs of section `others`"""
    words = []
    for name, run in other_runs(board).items():
        folder = folder_of(args, run)
        paths = checkpoints_in(folder)
        missing = not paths or not (folder / "finished").exists()
        label = label_of(name, board)
        refuse(missing, f"{folder}: {label} of --section others is not finished or has no checkpoint")
        words.append(f"{name}={paths[0]}")
    return words


def resolve(args: Args, command: str, checkpoints: list[str]) -> list[str]:
    """The words of a command that follows a run. RUN: its checkpoints. OTHERS_4x4, OTHERS_8x8: the learners of section
    `others` on that board. --extra-then goes before the flags of another script."""
    words = []
    for word in command.split():
        if word == "RUN":
            words += checkpoints
        elif word.startswith("OTHERS_"):
            words += named_others(args, word.removeprefix("OTHERS_"))
        else:
            words.append(word)
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *args.extra_then.split(), *words[end:]]


def make(args: Args, run: Run) -> None:
    """The run and what follows it"""
    folder = folder_of(args, run)
    if (folder / "finished").exists():
        return
    trained = (folder / "seconds").exists()
    resumable = trained or run.script != GRU  # the baseline saves only at the end
    begun = checkpoints_in(folder) if resumable else []
    if not begun:
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
        folder.mkdir(parents=True)

    def call(log: str, *command: str) -> None:
        with open(folder / f"{log}.log", "a") as file:
            subprocess.run([sys.executable, *command], cwd=ROOT, stdout=file, stderr=file, check=True)

    flags = [*run.flags.split(), *args.extra.split(), "--run-dir", str(folder)]
    if run.script != GRU:
        flags += ["--save-seconds", "120"]
    if begun:
        flags = ["--resume", begun[0]]
    elif run.before:
        script, script_flags, flag = run.before
        there = folder / "before"
        call("before", script, *script_flags.split(), *args.extra.split(), "--run-dir", str(there))
        flags += [flag, checkpoints_in(there)[0]]
    script = [run.script]
    if run.patch:
        script = ["benchmarks/experiments.py", "--patched", *run.patch, "--script", run.script, "--"]
    if not trained:
        started = time.time()
        call("train", *script, *flags)
        (folder / "seconds").write_text(f"{time.time() - started:.1f}")
    for number, command in enumerate(run.then):
        done = folder / f"then_{number}.done"
        if not done.exists():  # else of an attempt that was cut off later
            call(f"then_{number}", *resolve(args, command, checkpoints_in(folder)))
            done.touch()
    if not run.keep:
        for path in checkpoints_in(folder):
            Path(path).unlink()
    (folder / "finished").touch()


def needed_first(runs: list[Run]) -> list[Run]:
    """The learners that follow-ups of these runs name"""
    named = {word for run in runs for command in run.then for word in command.split()}
    boards = [board for board in BOARDS if f"OTHERS_{board}" in named]
    return [run for board in boards for run in other_runs(board).values()]


def make_all(args: Args, runs: list[Run]) -> None:
    begun = time.time()
    longest_first = sorted(dict.fromkeys(runs), key=lambda run: -len(run.then))
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        jobs = {pool.submit(make, args, run): run for run in longest_first}
        for count, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            state = "done"
            error = job.exception()
            if error is not None:
                reason = error if isinstance(error, UserError) else "see its logs"
                state = f"FAILED, {reason}"
            seconds = f"{time.time() - begun:.0f} s"
            name = folder_of(args, jobs[job]).name
            print(f"{seconds}, {count} of {len(jobs)}: {state}: {name}", flush=True)


# ----------------------------------------------------------------------------------------
# docs/data, from the folders of the runs


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_csv(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def figures_of(row: dict) -> dict[str, float]:
    """What we follow, of one line of metrics.jsonl"""
    figures = {name: row[key] for name, key in FOLLOWED.items() if row.get(key) is not None}
    if "moa/nll" in row:
        figures["moa_gap"] = row["moa/nll"] - row["moa/ceiling/nll"]
    return figures


def figures_before(folder: Path) -> list[dict[str, float]]:
    """What the pretraining of each seed found in held-out games"""
    of_seeds = []
    for path in sorted(folder.glob("before/*/evaluation/final.csv")):
        of_seeds.append({row["metric"]: float(row["with history"]) for row in read_csv(path)})
    for path in sorted(folder.glob("before/*/evaluation.csv")):  # of the world model: all seeds in one
        table = read_csv(path)
        seeds = [name for name in table[0] if name.startswith("seed_")]
        of_seeds = [{row["metric"]: float(row[seed]) for row in table} for seed in seeds]
    names = ("probe_accuracy", "top1", "nll", "exact_match/1", "exact_match/20", "obs_mse", "reward_mse")
    return [{key: figures[key] for key in names if key in figures} for figures in of_seeds]


def device_of(log: str) -> str:
    return "cuda" if re.search(r" on (\d+ x )?cuda", log) else "cpu"


def summary_of(lines: list[dict]) -> dict:
    """Of one seed's metrics.jsonl: means over the last fifth, and when returns were reached"""
    figures = [figures_of(line) for line in lines]
    last = figures[-max(1, len(figures) // 5) :]
    row = {"steps": lines[-1]["steps"]}
    for key in last[-1]:
        row[key] = np.mean([f[key] for f in last if key in f])
    fifths = np.array_split([f.get("return", 0.0) for f in figures], min(5, len(figures)))
    means = [part.mean() for part in fifths]
    row["fall"] = max(means) - means[-1]
    for goal in (2.7, 2.8, 2.85, 4.5):
        reached = [k for k, f in enumerate(figures) if f.get("return", 0) >= goal]
        first = lines[reached[0]] if reached else {}
        row[f"steps_to_{goal}"] = first.get("steps", "")
        row[f"seconds_to_{goal}"] = first.get("time/training", "")
    row |= {key: value for key, value in lines[-1].items() if key.startswith("time/")}
    return row


def curve_of(lines: list[dict]) -> list[dict]:
    """Up to 40 of its lines"""
    rows = []
    for k in sorted(set(np.linspace(0, len(lines) - 1, 40).astype(int))):
        figures = figures_of(lines[k])
        kept = {key: figures.get(key, "") for key in ("return", "value_real")}
        rows.append({"steps": lines[k]["steps"], **kept})
    return rows


def tables_of(folder: Path, run: Run, adaptation_sets: list[str]) -> dict[str, list[dict]]:
    """name of a table -> its rows of one run"""
    adaptation_tables = ("_adaptation", "_adaptation_repetitions", "_adaptation_curves")
    tables = {name: [] for name in ("", "_curves", *adaptation_tables, "_cross_play", "_together")}
    before = figures_before(folder)
    device = device_of((folder / "train.log").read_text())
    for seed, path in enumerate(sorted(glob.glob(f"{folder}/*/metrics.jsonl"))):
        lines = read_lines(Path(path))
        if not lines:
            continue
        flags = f"{run.script} {run.flags}"
        row = {"seed": seed, "device": device, "flags": flags, **summary_of(lines)}
        if before:
            row |= {f"before/{key}": value for key, value in before[seed].items()}
        tables[""].append(row)
        tables["_curves"] += [{"seed": seed, **row} for row in curve_of(lines)]
    ends = ("", "_repetitions", "_curve")
    for sets, (name, end) in itertools.product(adaptation_sets, zip(adaptation_tables, ends, strict=True)):
        for path in folder.glob(f"*/adaptation_{sets}{end}.csv"):
            tables[name] += [{"sets": sets, **row} for row in read_csv(path)]
    for row in tables["_adaptation_curves"]:
        row["return"] = float(row["return"])
    for path in folder.glob("*/partners*.csv"):
        population = path.stem.removeprefix("partners").lstrip("_")
        tables["_together"] += [{"population": population, **row} for row in read_csv(path)]
    for path in folder.glob("*/cross_play.csv"):
        for focal, row in enumerate(read_csv(path)):
            _, *returns = row.values()
            for others, value in enumerate(returns):
                tables["_cross_play"].append({"focal": focal, "others": others, "return": value})
    return tables


def collect(args: Args, number: str) -> None:
    """docs/data/section_NUMBER*.csv from the folders of the runs"""
    section = SECTIONS[number]
    labels = list(section.runs)
    adaptation_sets = [key for kind, key in section.panels if kind == "adaptation"]
    tables = {}
    for label, run in section.runs.items():
        folder = folder_of(args, run)
        if not (folder / "seconds").exists():  # not trained to the end
            continue
        for name, rows in tables_of(folder, run, adaptation_sets).items():
            tables.setdefault(name, []).extend({"run": label, **row} for row in rows)
    for name, rows in tables.items():
        fresh = {row["run"] for row in rows}
        # What ran elsewhere stays.
        elsewhere = [row for row in read(args, number, name) if row["run"] not in fresh]
        rows = [row for row in rows + elsewhere if row["run"] in labels]
        rows.sort(key=lambda row: labels.index(row["run"]))
        if rows:
            write(Path(args.docs) / "data" / f"section_{number}{name}.csv", rows)


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


# ----------------------------------------------------------------------------------------
# Tables and figures, from docs/data alone


def read(args: Args, number: str, name: str = "") -> list[dict]:
    path = Path(args.docs) / "data" / f"section_{number}{name}.csv"
    return read_csv(path) if path.exists() else []


Interval = tuple[float, float, float]


def interval(values: list[float]) -> Interval:
    """mean and its 95 % interval (Student's t)"""
    values = np.asarray(values, np.float64)
    half = math.nan
    if len(values) > 1:
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    mean = values.mean()
    return float(mean), float(mean - half), float(mean + half)


def plus_minus(of_mean: Interval | None, digits: int = 3) -> str:
    if of_mean is None:
        return ""
    mean, _, high = of_mean
    if math.isnan(high):  # one seed, or always the same
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {high - mean:.{digits}f}"


def paired(rows: list[dict], run: str, base: str, key: str = "return") -> Interval | None:
    """mean difference of two runs in the same seeds, and its 95 % interval"""
    of_run, of_base = (
        {row["seed"]: float(row[key]) for row in rows if row["run"] == name and row.get(key)} for name in (run, base)
    )
    seeds = of_run.keys() & of_base.keys()
    return interval([of_run[seed] - of_base[seed] for seed in seeds]) if seeds else None


def by_run(rows: list[dict], key: str) -> dict[str, list[float]]:
    values = {}
    for row in rows:
        values.setdefault(row["run"], [])
        if row.get(key):
            values[row["run"]].append(float(row[key]))
    return {run: numbers for run, numbers in values.items() if numbers}


def labels_in(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["run"] for row in rows))


def print_table(header: list[str], rows: list[list[str]]) -> None:
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


# ---- Panels


def numbered(rows: list[dict]) -> dict[str, int]:
    """run -> its number in the section, so that it has the same colour in every panel"""
    return {row["run"]: row["number"] for row in rows}


def line_style(number: int) -> dict:
    """Eight colours, then the same dashed"""
    return {"color": f"C{number % 8}", "ls": "-" if number < 8 else "--"}


def heat_map(axis, table: np.ndarray, low: float, high: float, fontsize: float = 8) -> None:
    """Numbers in coloured cells, dark ones in white"""
    axis.imshow(table, vmin=low, vmax=high, aspect="auto")
    axis.grid(visible=False)
    for (y, x), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if value > low + 0.6 * (high - low) else "black"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=fontsize)


def bars(axis, rows: list[dict], key: str) -> None:
    of_runs = by_run(rows, key)
    for y, values in enumerate(of_runs.values()):
        mean, low, high = interval(values)
        axis.barh(y, mean, color="C5")
        axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color="black", capsize=3)
        axis.plot(values, [y] * len(values), ".", color="black", alpha=0.4, markersize=4)
    means = [np.mean(values) for values in of_runs.values()]
    if key.startswith("steps") and max(means) > 20 * min(means):
        axis.set_xscale("log")
    axis.set(title=TITLES.get(key, key))
    axis.set_yticks(range(len(of_runs)), of_runs)
    axis.grid(axis="y", visible=False)
    axis.invert_yaxis()


def points(axis, rows: list[dict], key: str) -> None:
    """Means and intervals, where bars from zero on would all look alike"""
    of_runs = by_run(rows, key)
    for y, values in enumerate(of_runs.values()):
        mean, low, high = interval(values)
        axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color=f"C{y}", fmt="o", capsize=4)
        axis.plot(values, [y + 0.2] * len(values), ".", color=f"C{y}", alpha=0.4, markersize=4)
    axis.set_yticks(range(len(of_runs)), of_runs)
    axis.set(title=f"{key} at the end")
    axis.grid(axis="y", visible=False)
    axis.invert_yaxis()


def curves(axis, rows: list[dict], key: str) -> None:
    for run, number in numbered(rows).items():
        at_steps = {}
        for row in rows:
            if row["run"] == run and row.get(key):
                at_steps.setdefault(int(row["steps"]), []).append(float(row[key]))
        steps = sorted(at_steps)
        means = [np.mean(at_steps[s]) for s in steps]
        axis.plot(steps, means, label=run, **line_style(number))
    axis.set(xlabel="env steps", title=TITLES.get(key, key))
    axis.legend()


def late_curves(axis, rows: list[dict], key: str) -> None:
    """The upper quarter, where the runs differ"""
    curves(axis, rows, key)
    top = max(float(row[key]) for row in rows if row.get(key))
    axis.set_ylim(0.75 * top, 1.01 * top)


def by_return(rows: list[dict], key: str) -> dict[str, list[float]]:
    """run -> mean of `key` over the log lines whose return lies between two of RETURNS"""
    of_runs = {}
    for run in labels_in(rows):
        filled = [row for row in rows if row["run"] == run and row["return"] and row[key]]
        pairs = [(float(row["return"]), float(row[key])) for row in filled]
        bins = [[y for x, y in pairs if low <= x < high] for low, high in itertools.pairwise(RETURNS)]
        of_runs[run] = [float(np.mean(values)) if values else math.nan for values in bins]
    return of_runs


def against(axis, rows: list[dict], key: str) -> None:
    middle = [(low + high) / 2 for low, high in itertools.pairwise(RETURNS)]
    for run, values in by_return(rows, key).items():
        axis.plot(middle, values, label=run, marker=".", **line_style(numbered(rows)[run]))
    axis.set(xlabel="return at that time", title=TITLES.get(key, key))
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def meeting(axis, rows: list[dict], players: str) -> None:
    """return while it meets the same co-players"""
    rows = [row for row in rows if row["co_players"] == players and row["learner"] == "learning"]
    for run, number in numbered(rows).items():
        of_run = [row for row in rows if row["run"] == run]
        steps = [int(row["steps"]) for row in of_run]
        returns = [float(row["return"]) for row in of_run]
        axis.plot(steps, returns, label=run, **line_style(number))
    axis.set(xlabel="env steps with them", title=f"return beside {players}, learning")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def seats(axis, rows: list[dict], key: str) -> None:
    """Return (key: player) or MOA's cross-entropy (moa_nll) of the learner in each seat"""
    runs = list(by_run(rows, f"{key}_3"))  # not those in which all share one learner
    for i in range(4):
        of_runs = by_run(rows, f"{key}_{i}")
        means = np.array([interval(of_runs[run]) for run in runs])  # [runs, (mean, low, high)]
        spread = np.abs(means[:, 1:] - means[:, :1]).T
        y = np.arange(len(runs)) + 0.15 * i
        axis.errorbar(means[:, 0], y, xerr=spread, fmt="o", capsize=3, label=f"seat {i + 1}")
    axis.set(yticks=np.arange(len(runs)) + 0.22, title=f"{TITLES.get(key, 'return')} by seat")
    axis.set_yticklabels(runs)
    axis.invert_yaxis()
    axis.legend()


def adaptation(axis, scores: dict[str, dict[str, float]], _: str) -> None:
    players = list(dict.fromkeys(p for row in scores.values() for p in row))
    table = np.array([[row.get(p, np.nan) for p in players] for row in scores.values()])
    heat_map(axis, table, 0, 1)
    axis.set(title="score: random 0, best response 1")
    axis.set_xticks(range(len(players)), players, rotation=35, ha="right")
    axis.set_yticks(range(len(scores)), scores)


def together(axis, rows: list[dict], _: str) -> None:
    """By how many games the learner and its partner have played with each other"""
    rows = [row for row in rows if not row["population"]]  # the partners of the training
    for run, number in numbered(rows).items():
        for key, style in (("return", "-"), ("shuffled", ":")):
            games = by_game(rows, run, key)
            means = [interval(values)[0] for values in games.values()]
            label = run if key == "return" else None
            axis.plot(list(games), means, style, color=f"C{number}", label=label)
    axis.set(xlabel="game together (dotted: subgoals of other games)", title="return, frozen")
    axis.set_xticks(range(2, 21, 2))
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


# ---- Tables


def steps_to(rows: list[dict], run: str, goal: float) -> list[float]:
    """Steps that each seed needs to a return of `goal`; infinity where it never has it"""
    first = {}
    for row in rows:
        if row["run"] == run and row.get("return"):
            steps = float(row["steps"]) if float(row["return"]) >= goal else math.inf
            first[row["seed"]] = min(first.get(row["seed"], math.inf), steps)
    return list(first.values())


def print_ladder(args: Args, number: str) -> None:
    """What knowing is worth: paired differences to `none`, and as a share of what the exact posterior gains"""
    rows = read(args, number)
    curve_rows = read(args, number, "_curves")
    returns = by_run(rows, "return")
    if "none" not in returns:  # --only others
        return
    of_none = interval(returns["none"])[0]
    posterior = paired(rows, "posterior", "none")
    table = []
    for run in labels_in(rows):
        gain = paired(rows, run, "none")
        share = ""
        if posterior and posterior[0] > 0.05:
            share = f"{gain[0] / posterior[0]:.0%}"
        steps = np.median(steps_to(curve_rows, run, 0.95 * of_none)) / 1e6
        cells = [run, plus_minus(interval(returns[run])), plus_minus(gain), share]
        table.append([*cells, plus_minus(paired(rows, run, "GRU")), f"{steps:.2f}"])
    gains = ["gain over none", "of the posterior's gain", "against the GRU"]
    print_table(["arm", "return", *gains, "M steps to 95 % of none"], table)


def by_game(rows: list[dict], run: str, key: str) -> dict[int, list[float]]:
    """number of the game together -> what each seed earns in it"""
    games = {}
    for row in rows:
        if row["run"] == run and row.get(key):
            games.setdefault(int(row["game"]), []).append(float(row[key]))
    return dict(sorted(games.items()))


def mean_of_games(rows: list[dict], run: str, key: str, games: range) -> Interval | None:
    """Of some games together, over seeds"""
    of_seeds = {}
    for row in rows:
        if row["run"] == run and int(row["game"]) in games and row.get(key):
            of_seeds.setdefault(row["seed"], []).append(float(row[key]))
    return interval([np.mean(values) for values in of_seeds.values()]) if of_seeds else None


GAMES = {
    "game 1": range(1, 2),
    "game 2": range(2, 3),
    "game 3": range(3, 4),
    "games 11-20": range(11, 21),
}


def print_together(args: Args, number: str) -> None:
    """What is earned in the first games with a partner and later on; then with subgoals of other games"""
    rows = [row for row in read(args, number, "_together") if not row["population"]]
    table = []
    for run in labels_in(rows):
        cells = [plus_minus(mean_of_games(rows, run, "return", games)) for games in GAMES.values()]
        shuffled = mean_of_games(rows, run, "shuffled", GAMES["games 11-20"])
        table.append([run, *cells, plus_minus(shuffled)])
    if table:
        print_table(["arm, frozen", *GAMES, "shuffled, 11-20"], table)


def seat_test(rows: list[dict], run: str, draws: int = 20_000, key: str = "player") -> tuple[np.ndarray, float]:
    """mean return (or another key) of each seat, and p of a permutation test: seats exchanged within each seed,
    variance of the four means"""
    of_run = [row for row in rows if row["run"] == run]
    table = np.array([[float(row[f"{key}_{i}"]) for i in range(4)] for row in of_run])  # [seeds, seats]
    order = np.random.default_rng(0).random((draws, *table.shape)).argsort(2)
    shuffled = np.take_along_axis(np.broadcast_to(table, order.shape), order, 2)
    variances = shuffled.mean(1).var(1)
    means = table.mean(0)
    return means, float((variances >= means.var() - 1e-12).mean())


BAYES = "Bayes hunter"


def references(args: Args) -> dict[tuple[str, str], tuple[float, float]]:
    """board, co-players -> what a random player and a best response earn"""
    rows = [row for number in ("7", "8") for row in read(args, number, "_adaptation")]
    return reference_returns(rows)


def reference_returns(rows: list[dict]) -> dict[tuple[str, str], tuple[float, float]]:
    returns = {}
    for row in rows:
        if row.get("best response mean"):
            place = board_of(row["run"]), row["co_players"]
            returns[place] = float(row["random mean"]), float(row["best response mean"])
    return returns


def normalised(rows: list[dict], of_references: dict, sets: str) -> dict[str, dict[str, float]]:
    """run and mode -> co-players -> score; random 0, best response 1 (of the run that measured them on this board, as
    the Bayes hunter)"""
    scores = {}
    for row in rows:
        if row["sets"] != sets:
            continue
        board = board_of(row["run"])
        low, high = of_references.get((board, row["co_players"]), (math.nan, math.nan))
        for mode in (BAYES, "frozen", "search", "unguarded", "learning", "both"):
            if row.get(f"{mode} mean"):
                label = label_of(BAYES, board) if mode == BAYES else f"{row['run']}, {mode}"
                score = (float(row[f"{mode} mean"]) - low) / (high - low)
                scores.setdefault(label, {})[row["co_players"]] = score
    return scores


def compared() -> list[tuple[str, str, str, str]]:
    """run, mode of evaluation/adapt.py, and from which run's and mode's return it differs"""
    pairs = []
    for board in BOARDS:
        hopplus = label_of("HOP+", board)
        for method in ("PPO, mixed", "GRU, mixed", "+ subgoals, mixed"):
            pairs.append((hopplus, "learning", label_of(method, board), "learning"))
        pairs.append((hopplus, "learning", hopplus, "frozen"))
        pairs.append((hopplus, "search", hopplus, "frozen"))
    pairs.append(("HOP+ MCTS", "search", "HOP+ MCTS", "frozen"))
    for without in ("no memory", "policy without subgoals"):
        for mode in ("frozen", "learning"):
            pairs.append(("HOP+", mode, f"HOP+, {without}", mode))
    return pairs


def mean_returns(rows: list[dict], run: str, mode: str) -> dict[str, dict[str, float]]:
    """co-players -> seed -> return in all its repetitions"""
    returns = {}
    for row in rows:
        if row["run"] == run and row.get(mode):
            of_set = returns.setdefault(row["co_players"], {})
            of_set.setdefault(row["seed"], []).append(float(row[mode]))
    return {
        players: {seed: float(np.mean(values)) for seed, values in of_set.items()}
        for players, of_set in returns.items()
    }


def print_differences(args: Args, number: str) -> None:
    """What one learner earns more than another beside the same players, seed by seed"""
    rows = read(args, number, "_adaptation_repetitions")
    for run, mode, base, base_mode in compared():
        of_base = mean_returns(rows, base, base_mode)
        texts = []
        for players, returns in mean_returns(rows, run, mode).items():
            seeds = returns.keys() & of_base.get(players, {}).keys()
            if seeds:
                difference = interval([returns[seed] - of_base[players][seed] for seed in seeds])
                texts.append(f"{players} {plus_minus(difference)}")
        if texts:
            print(f"{run} {mode} minus {base} {base_mode}: " + ", ".join(texts))


# ---- The worst case: what a learner earns beside the co-players that it plays worst with

PERIODS = {  # of 2400 steps with the same co-players: how a column of returns ends
    "last quarter": "",
    "first 400 steps": " first 400",
    "first game": " first game",
}
CO_PLAYER_SETS = ("standard", "strangers", "learned")
METHOD_ORDER = [BAYES, *METHODS["4x4"]]


class Meeting(NamedTuple):
    """A learner beside all sets of co-players of a board"""

    board: str
    method: str
    mode: str  # frozen, learning; "" for the scripted hunter
    period: str
    returns: dict[str, dict[str, float]]  # co-players -> seed (of the scripted hunter: repetition) -> return
    test_steps: float | None  # real steps that are not counted as such, mean of all repetitions


class WorstCase(NamedTuple):
    num_sets: int
    worst_set: str
    worst_score: Interval
    mean_score: Interval
    regret_set: str
    worst_regret: Interval


def read_repetitions(args: Args) -> list[dict]:
    """Of sections 7 and 8. The scripted hunter, whom nobody trained, has repetitions instead of seeds."""
    rows = [row for number in ("7", "8") for row in read(args, number, "_adaptation_repetitions")]
    of_hunter = []
    for row in rows:
        if row.get(BAYES):
            scripted = {key: value for key, value in row.items() if key.startswith(BAYES)}
            scripted["run"] = label_of(BAYES, board_of(row["run"]))
            scripted["seed"] = row["repetition"]
            scripted["sets"] = row["sets"]
            scripted["co_players"] = row["co_players"]
            of_hunter.append(scripted)
    return rows + of_hunter


def read_meetings(args: Args) -> list[Meeting]:
    rows = read_repetitions(args)
    labels = labels_in(rows)
    order = [*METHOD_ORDER, *map(method_of, labels)]
    labels.sort(key=lambda label: order.index(method_of(label)))
    meetings = []
    for label, mode, period in itertools.product(labels, (BAYES, "frozen", "learning"), PERIODS):
        returns = mean_returns(rows, label, mode + PERIODS[period])
        scripted = method_of(label) == BAYES
        if not returns or scripted != (mode == BAYES):
            continue
        of_run = [row.get(f"{mode} test steps") for row in rows if row["run"] == label]
        steps = [float(value) for value in of_run if value]
        meetings.append(
            Meeting(
                board=board_of(label),
                method=method_of(label),
                mode="" if scripted else mode,
                period=period,
                returns=returns,
                test_steps=float(np.mean(steps)) if steps else None,
            )
        )
    return meetings


def scores_of(meeting: Meeting, of_references: dict) -> dict[str, dict[str, float]]:
    """co-players -> seed -> (return - random) / (best response - random)"""
    scores = {}
    for players, returns in meeting.returns.items():
        low, high = of_references[meeting.board, players]
        scores[players] = {seed: (value - low) / (high - low) for seed, value in returns.items()}
    return scores


def worst_case(meeting: Meeting, of_references: dict) -> WorstCase:
    """The worst set is the one with the lowest mean over seeds: the lowest of each seed's scores would be lower by
    their noise alone. Its interval is that of this set. The mean is first over sets, then over seeds."""
    scores = scores_of(meeting, of_references)
    regrets = {}
    for players, returns in meeting.returns.items():
        _, high = of_references[meeting.board, players]
        regrets[players] = [high - value for value in returns.values()]
    of_sets = {players: interval(list(of_seeds.values())) for players, of_seeds in scores.items()}
    of_regrets = {players: interval(values) for players, values in regrets.items()}
    worst_set = min(of_sets, key=lambda players: of_sets[players][0])
    regret_set = max(of_regrets, key=lambda players: of_regrets[players][0])
    seeds = set.intersection(*(set(of_seeds) for of_seeds in scores.values()))
    means = [np.mean([of_seeds[seed] for of_seeds in scores.values()]) for seed in sorted(seeds)]
    return WorstCase(
        num_sets=len(scores),
        worst_set=worst_set,
        worst_score=of_sets[worst_set],
        mean_score=interval(means),
        regret_set=regret_set,
        worst_regret=of_regrets[regret_set],
    )


def complete(meetings: list[Meeting], of_references: dict) -> list[Meeting]:
    """Those beside all co-players with references; a worst of fewer would not compare"""
    kept = []
    left_out = []
    for meeting in meetings:
        players = {players for board, players in of_references if board == meeting.board}
        met = {name: returns for name, returns in meeting.returns.items() if name in players}
        if len(met) == len(players):
            kept.append(meeting._replace(returns=met))
        elif meeting.period == "last quarter":
            name = label_of(meeting.method, meeting.board)
            left_out.append(f"{name}, {meeting.mode} ({len(met)} of {len(players)})")
    if left_out:
        print(f"left out, since they did not meet all sets: {'; '.join(left_out)}")
    return kept


def learner_name(meeting: Meeting) -> str:
    return f"{meeting.method}, {meeting.mode}" if meeting.mode else meeting.method


def worst_row(meeting: Meeting, worst: WorstCase) -> dict:
    """A row of docs/data/worst_case.csv"""
    row = {
        "board": meeting.board,
        "method": meeting.method,
        "mode": meeting.mode,
        "period": meeting.period,
        "sets": worst.num_sets,
        "worst set": worst.worst_set,
        "worst regret set": worst.regret_set,
        "test steps": "" if meeting.test_steps is None else meeting.test_steps,
    }
    intervals = {
        "worst score": worst.worst_score,
        "mean score": worst.mean_score,
        "worst regret": worst.worst_regret,
    }
    for name, (mean, low, high) in intervals.items():
        row |= {name: mean, f"{name} low": low, f"{name} high": high}
    return row


def print_worst(board: str, of_periods: dict[str, dict[str, tuple[Meeting, WorstCase]]]) -> None:
    """of_periods: period -> learner -> what it met, and the worst of it"""
    later = of_periods["last quarter"]
    if not later:
        return
    num_sets = next(iter(later.values()))[1].num_sets
    print(f"\n{board}, {num_sets} sets of co-players, the last quarter of the steps")
    table = []
    for name, (meeting, worst) in later.items():
        steps = "" if meeting.test_steps is None else f"{meeting.test_steps:.0f}"
        regret = [plus_minus(worst.worst_regret, 2), worst.regret_set]
        table.append([name, *score_cells(worst), *regret, steps])
    scores = ["worst score", "beside", "mean score"]
    print_table(["learner", *scores, "worst regret", "beside", "test steps"], table)
    for period, learners in of_periods.items():
        if period != "last quarter" and learners:
            print(f"\n{board}, the {period}")
            table = [[name, *score_cells(worst)] for name, (_, worst) in learners.items()]
            print_table(["learner", *scores], table)


def score_cells(worst: WorstCase) -> list[str]:
    return [plus_minus(worst.worst_score, 2), worst.worst_set, plus_minus(worst.mean_score, 2)]


def draw_worst(args: Args) -> None:
    """docs/data/worst_case.csv, its tables, and docs/results/worst_case.png"""
    of_references = references(args)
    print(f"\n## {SECTIONS['worst'].title}\n")
    meetings = complete(read_meetings(args), of_references)
    if not meetings:
        print("section worst: no data yet")
        return
    rows = []
    for board in BOARDS:
        of_periods = {period: {} for period in PERIODS}
        for meeting in meetings:
            if meeting.board == board:
                worst = worst_case(meeting, of_references)
                rows.append(worst_row(meeting, worst))
                of_periods[meeting.period][learner_name(meeting)] = meeting, worst
        print_worst(board, of_periods)
    write(Path(args.docs) / "data" / "worst_case.csv", rows)
    draw_worst_figure(args, meetings, of_references)


SCORE_COLOURS = "RdYlBu"  # red: no better than a random player
# In the figure's names
SHORTER = {"switching": "switch", "waiting": "wait", "random": "rand", " + ": "+"}


def short_name(players: str) -> str:
    for word, shorter in SHORTER.items():
        players = players.replace(word, shorter)
    return players


def draw_worst_figure(args: Args, meetings: list[Meeting], of_references: dict) -> None:
    """Scores of learners that go on learning, and of the scripted hunter: methods x sets, and the worst of each"""
    import matplotlib.pyplot as plt

    of_boards = {}
    for meeting in meetings:
        shown = meeting.method in METHOD_ORDER and meeting.mode != "frozen"
        if shown and meeting.period == "last quarter":
            of_boards.setdefault(meeting.board, []).append(meeting)
    kinds = {row["co_players"]: row["sets"] for row in read_repetitions(args)}
    heights = [len(learners) for learners in of_boards.values()]
    figure, axes = plt.subplots(len(of_boards), 1, squeeze=False, height_ratios=heights)
    set_names = set()
    for axis, (board, learners) in zip(axes.flat, of_boards.items(), strict=True):
        sets = sorted(learners[0].returns, key=lambda players: CO_PLAYER_SETS.index(kinds[players]))
        set_names.add(tuple(sets))
        draw_board(axis, learners, sets, kinds, of_references)
        axis.set_title(f"{board}, learning", loc="left", fontsize=12, weight="bold", pad=20)
    if len(set_names) == 1:  # said once is enough
        for axis in axes.flat[:-1]:
            axis.set_xticks([])
    figure.set_size_inches(9.6, 1.5 + 0.33 * sum(heights) + 0.5 * len(heights))
    figure.tight_layout(h_pad=0.8)
    colours = plt.cm.ScalarMappable(norm=plt.Normalize(0, 1), cmap=SCORE_COLOURS)
    bar = figure.colorbar(colours, ax=axes, fraction=0.02, pad=0.015, aspect=30)
    bar.set_label("score: random 0, best response 1", fontsize=10)
    save(args, figure, "worst_case", dpi=120, pil_kwargs={"optimize": True})


def draw_board(axis, learners: list[Meeting], sets: list[str], kinds: dict, of_references: dict) -> None:
    """Rows: learners. Columns: the sets, with a gap between kinds of them, and at the right the worst"""
    places = {}
    place = -1.0
    for players, before in zip(sets, [sets[0], *sets], strict=False):
        place += 1.0 if kinds[players] == kinds[before] else 1.3
        places[players] = place
    worst_place = place + 1.7
    for y, learner in enumerate(learners):
        scores = scores_of(learner, of_references)
        means = {players: float(np.mean(list(scores[players].values()))) for players in sets}
        for players, x in places.items():
            score_cell(axis, x, y, means[players])
        score_cell(axis, worst_place, y, min(means.values()), worst=True)
    for kind in dict.fromkeys(kinds[players] for players in sets):
        first = min(x for players, x in places.items() if kinds[players] == kind)
        axis.text(first - 0.5, -0.62, kind, fontsize=10, va="bottom", color="0.35")
    axis.set(xlim=(-0.5, worst_place + 0.65), ylim=(len(learners) - 0.5, -0.5))
    names = [*map(short_name, sets), "worst"]
    style = {"rotation": 38, "ha": "right", "rotation_mode": "anchor", "fontsize": 10}
    axis.set_xticks([*places.values(), worst_place], names, **style)
    axis.get_xticklabels()[-1].set(weight="bold", fontsize=12)
    axis.set_yticks(range(len(learners)), [learner.method for learner in learners], fontsize=11)
    axis.get_yticklabels()[-1].set_weight("bold")  # HOP+
    axis.grid(visible=False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def score_cell(axis, x: float, y: float, score: float, worst: bool = False) -> None:
    """A number on the colour of its score; what is below 0 has the colour of 0"""
    import matplotlib.pyplot as plt

    colour = plt.get_cmap(SCORE_COLOURS)(min(max(score, 0.0), 1.0))
    half = 0.64 if worst else 0.48
    style = {"fontsize": 12, "weight": "bold"} if worst else {"fontsize": 9.5}
    style["color"] = "white" if score < 0.12 or score > 0.84 else "black"
    axis.add_patch(plt.Rectangle((x - half, y - 0.46), 2 * half, 0.92, facecolor=colour))
    axis.text(x, y, f"{score:.2f}", ha="center", va="center", **style)


# ---- A partner of a new kind

NEW_PARTNER_LINES = {  # arm, column of partners.py's table: style
    ("none", "return"): {"color": "C0", "ls": "--"},
    ("none", "learning"): {"color": "C0"},
    ("inferred", "return"): {"color": "C2", "ls": "--"},
    ("GRU", "return"): {"color": "C3", "ls": "--"},
    ("GRU", "learning"): {"color": "C3"},
    ("HOP+", "return"): {"color": "C6", "ls": "--"},
    ("HOP+", "learning"): {"color": "C6"},
}


def draw_new_partner(args: Args) -> None:
    """docs/results/new_partner.png: return by the number of the game, frozen and learning"""
    import matplotlib.pyplot as plt

    title = SECTIONS["new-partner"].title
    print(f"\n## {title}")
    panels = {}
    for task, population in itertools.product(("stays-4x4", "stays-8x8"), STRANGE_PARTNERS):
        rows = [row for row in read(args, task, "_together") if row["population"] == population]
        if rows:
            panels[task, population] = rows
    if not panels:
        print("section new-partner: no data yet")
        return
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    size = (4.6 * columns, 3.2 * lines)
    figure, axes = plt.subplots(lines, columns, squeeze=False, figsize=size, sharex=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, ((task, population), rows) in zip(axes.flat, panels.items(), strict=False):
        print(f"\n{TASKS[task].title}; partner {population}")
        new_partner(axis, rows)
        axis.set(title=f"{task.removeprefix('stays-')}, {population}", xticks=range(2, 21, 2))
    for axis in axes[-1]:
        axis.set_xlabel("game together")
    for axis in axes[:, 0]:
        axis.set_ylabel("return")
    by_label = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        by_label |= dict(zip(labels, handles, strict=True))
    figure.tight_layout()
    figure.legend(by_label.values(), by_label, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=10)
    figure.suptitle(title, y=1, verticalalignment="bottom")
    save(args, figure, "new_partner", dpi=120)


def new_partner(axis, rows: list[dict]) -> None:
    """One partner on one board: a line and its 95 % interval for each learner; prints what it draws"""
    table = []
    for (run, key), style in NEW_PARTNER_LINES.items():
        games = by_game(rows, run, key)
        if not games:
            continue
        name = f"{run}, {'frozen' if key == 'return' else key}"
        mean, low, high = np.array([interval(values) for values in games.values()]).T
        axis.plot(list(games), mean, label=name, **style)
        axis.fill_between(list(games), low, high, color=style["color"], alpha=0.12, linewidth=0)
        means = [mean_of_games(rows, run, key, part) for part in GAMES.values()]
        table.append([name, *map(plus_minus, means)])
    print_table(["learner", *GAMES], table)


# ---- A section

SUMMARIES = {"worst": draw_worst, "new-partner": draw_new_partner}
DRAWS = {  # kind of panel: function, the table that it draws
    "bars": (bars, ""),
    "points": (points, ""),
    "seats": (seats, ""),
    "curves": (curves, "_curves"),
    "late curves": (late_curves, "_curves"),
    "against": (against, "_curves"),
    "adaptation": (adaptation, "_adaptation"),
    "meeting": (meeting, "_adaptation_curves"),
    "together": (together, "_together"),
}


def save(args: Args, figure, name: str, **options) -> None:
    import matplotlib.pyplot as plt

    path = Path(args.docs) / "results" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", **options)
    plt.close(figure)


def has_data(kind: str, key: str, source: list[dict], scores: dict) -> bool:
    """Not every table has what a panel draws"""
    if kind == "adaptation":
        return bool(scores[key])
    needed = {"bars": key, "seats": f"{key}_3"}.get(kind)
    return bool(source) and (needed is None or bool(by_run(source, needed)))


def draw_panels(args: Args, number: str, rows: list[dict], panels: list, scores: dict) -> None:
    import matplotlib.pyplot as plt

    order = labels_in(rows)
    count = len(order)
    lines = {"adaptation": max(map(len, scores.values())), "seats": 1.5 * count, "meeting": 8}
    heights = [max(3.6, 1.6 + 0.22 * lines.get(kind, count)) for kind, _ in panels]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    heights = [max(heights[k : k + columns]) for k in range(0, len(heights), columns)]
    figure, axes = plt.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    figure.set_size_inches(5.6 * columns, sum(heights))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (kind, key) in zip(axes.flat, panels, strict=False):
        function, source = DRAWS[kind]
        drawn = scores[key] if kind == "adaptation" else read(args, number, source)
        if kind != "adaptation":
            drawn = [row | {"number": order.index(row["run"])} for row in drawn]
        function(axis, drawn, key)
    figure.tight_layout()
    title = SECTIONS[number].title
    if number not in TASKS:
        title = f"{number}. {title}"
    figure.suptitle(title, y=1, verticalalignment="bottom")
    save(args, figure, f"section_{number}")


def cell_of(values: list[float], count: int, key: str) -> str:
    """Mean and interval of one run; `count`: its seeds"""
    if not values:
        return "never" if "steps_to" in key else ""
    mean, low, high = interval(values)
    text = f"{mean:.4g} [{low:.4g}, {high:.4g}]"
    return text if len(values) == count else f"{text} ({len(values)} of {count} seeds)"


def print_section(args: Args, number: str, rows: list[dict], panels: list, scores: dict) -> None:
    keys = ["return", *(key for kind, key in panels if kind == "bars")]
    keys = list(dict.fromkeys(keys))
    table = []
    for run in labels_in(rows):
        count = sum(row["run"] == run for row in rows)
        cells = [cell_of(by_run(rows, key).get(run, []), count, key) for key in keys]
        table.append([run, str(count), *cells])
    print(f"\n## {number}. {SECTIONS[number].title}")
    print_table(["run", "seeds", *keys], table)
    for key in (key for kind, key in panels if kind == "seats"):
        for run in by_run(rows, f"{key}_3"):
            means, p = seat_test(rows, run, key=key)
            of_seats = ", ".join(f"{mean:.3f}" for mean in means)
            print(f"{run}: {key} by seat {of_seats}; all equal: p = {p:.2g}")
    if number in TASKS:
        print_ladder(args, number)
        print_together(args, number)
    for key in (key for kind, key in panels if kind == "against"):
        for run, values in by_return(read(args, number, "_curves"), key).items():
            losses = ", ".join(f"{value:.2f}" for value in values)
            print(f"{run}: {key} at returns between {RETURNS}: {losses}")
    for of_runs in scores.values():
        for run, of_sets in of_runs.items():
            texts = [f"{players} {value:.3f}" for players, value in of_sets.items()]
            print(f"{run}: {', '.join(texts)}")
    print_differences(args, number)


def draw(args: Args, number: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(STYLE)
    if number in SUMMARIES:
        SUMMARIES[number](args)
        return
    rows = read(args, number)
    if not rows:
        print(f"section {number}: no data yet")
        return
    met = read(args, number, "_adaptation")
    of_references = references(args)
    scores = {sets: normalised(met, of_references, sets) for sets in CO_PLAYER_SETS}
    panels = []
    for kind, key in SECTIONS[number].panels:
        if has_data(kind, key, read(args, number, DRAWS[kind][1]), scores):
            panels.append((kind, key))
    draw_panels(args, number, rows, panels, scores)
    print_section(args, number, rows, panels, scores)


# ----------------------------------------------------------------------------------------
# Command line


def main_patched(args: Args) -> None:
    for name in args.patched:
        refuse(name not in PATCHES, f"--patched {name}: the known ones are {', '.join(PATCHES)}")
    script = patched_script(args.script, {name: PATCHES[name] for name in args.patched})
    script.main(script.parse_args(list(args.words)))


def print_list() -> None:
    for number, section in SECTIONS.items():
        print(f"{number}. {section.title}")
        for label, run in section.runs.items():
            patch = f" [{', '.join(run.patch)}]" if run.patch else ""
            print(f"     {label}: {run.script} {run.flags}{patch}")
            for command in run.then:
                print(f"         then {command}")


def main(args: Args) -> None:
    if args.patched:
        main_patched(args)
        return
    if args.list:
        print_list()
        return
    for number in args.section:
        refuse(number not in SECTIONS, f"there is no section {number}: {', '.join(SECTIONS)}")
    labelled = [item for number in args.section for item in SECTIONS[number].runs.items()]
    known = [label for label, _ in labelled]
    for label in args.only:
        refuse(label not in known, f"--only {label}: the runs of these sections are {', '.join(known)}")
    if not args.draw:
        runs = [run for label, run in labelled if not args.only or label in args.only]
        make_all(args, needed_first(runs))
        make_all(args, runs)
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
