"""What is run: every section of experiments.py, with the flags of its runs."""

import dataclasses
from typing import NamedTuple

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
    before: tuple[tuple[str, str, str], ...] = ()  # script, flags, and the flag that takes its checkpoint
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
    columns: tuple[str, ...] = ()  # what its table says of each run beside the return
    sets: tuple[str, ...] = ()  # of evaluation/adapt.py
    references: tuple[str, ...] = ("7", "8")  # sections whose random players and best responses are 0 and 1
    moa: bool = False  # with tables of MOA by kind of co-player
    curves: bool = False  # with returns over time


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
        "PPO, mixed": Method(PPO, 1024, 13_000_000, f"--method ppo {SLOW} {MIXED}"),
        "GRU, mixed": Method(GRU, 1024, 13_000_000, f"{MIXED_GRU} {SLOW}"),
        "+ subgoals, mixed": Method(PPO, 1024, 13_000_000, f"{MIXED_OMG} {SLOW}"),
        "HOP+": Method(PPO, 256, 4_000_000),
    },
}
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
BEST = "evaluation/adapt.py RUN --best-response-steps 8000000 --modes frozen learning"


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
LADDER = f"{TEST_SEEDS} --learning-rate 1e-3 --ent-coef 0.01 --log-every 5"
LADDER_GAMES = 1024
ARMS = {  # what the policy may know: script and flags
    "none": (PPO, "--method ppo"),
    "actions": (PPO, "--method ppo-omg --subgoals actions"),
    "inferred": (PPO, "--method ppo-omg --subgoals inferred"),
    "GRU": (GRU, ""),
}
PARTNERS = "evaluation/partners.py RUN"
STRANGE_PARTNERS = ("nearest_stag", "left_stag")  # whom nobody met in training
ONE = "--num-stags 2 --population first_stag,last_stag,nearest_hare --seats learner,mixed,nearest_hare,nearest_hare"
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
}


# With the partners of the training, and with partners of a new kind
MEET_PARTNERS = (PARTNERS, *(f"{PARTNERS} --population {name}" for name in STRANGE_PARTNERS))


def arms(task: str) -> dict[str, Run]:
    """What the policy may know, in one game"""
    game_flags = f"{TASKS[task].flags} --total-timesteps {TASKS[task].steps}"
    runs = {}
    for name, (script, flags) in ARMS.items():
        flags = f"{LADDER} --num-envs {LADDER_GAMES} {game_flags} {flags}".rstrip()
        runs[name] = Run(flags, script, then=MEET_PARTNERS)
    runs["HOP+"] = Run(f"{TEST_SEEDS} {game_flags}", then=MEET_PARTNERS)
    return runs


def more_updates() -> dict[str, Run]:
    """With as many games at once as HOP+: a quarter of the ladder's, so four times the updates"""
    runs = {}
    for board in BOARDS:
        task = TASKS[f"stays-{board}"]
        for name in ("none", "inferred", "GRU"):
            script, flags = ARMS[name]
            words = f"{LADDER} --num-envs 256 {task.flags} --total-timesteps {task.steps} {flags}".split()
            runs[label_of(name, board)] = Run(" ".join(words), script, then=(PARTNERS,))
    return runs


def ladder() -> dict[str, Section]:
    return {name: Section(task.title, arms(name)) for name, task in TASKS.items()}


# ---- The other questions


def vae(flags: str) -> tuple[str, str, str]:
    return "pretrain_vae.py", flags, "--vae-checkpoint"


def world(flags: str) -> tuple[str, str, str]:
    return "pretrain_world_model.py", flags, "--world-model-checkpoint"


SEEDS5 = f"{TEST_SEEDS} --log-every 2"
SHORT = f"{SEEDS5} --total-timesteps 300000"
# PPO with few steps; with 5e-4 it would end with hares on 8x8
QUICK = "--num-envs 256 --learning-rate 5e-4"
QUICK_8X8 = "--num-envs 256 --learning-rate 1e-4"
SUBGOALS = f"{SHORT} --method ppo-omg {QUICK}"
SEARCH = f"{TEST_SEEDS} --num-envs 256 --total-timesteps 122880 --log-every 1"
FEW = f"{TEST_SEEDS} --log-every 2 --total-timesteps 100000 --num-envs 64"
PPO_FEW = f"{TEST_SEEDS} --log-every 2 --method ppo --total-timesteps 600000 {QUICK}"
PPO_FEW_8X8 = f"{TEST_SEEDS} --log-every 2 {LARGE} --method ppo --total-timesteps 2000000 {QUICK_8X8}"
TWO_STAGS = f"{TEST_SEEDS} --log-every 2 --total-timesteps 1000000 --num-stags 2"
ABLATED = method_flags(METHODS["4x4"]["HOP+"], "4x4", TEST_SEEDS)

# ---- What the models know: sections moa and pretraining; a board with walls

EVALUATE = "evaluation/evaluate.py RUN"
EVALUATE_MIXED = f"{EVALUATE} {MIXED}"
PROBE = "evaluation/subgoals.py RUN"
MODELS = (EVALUATE, EVALUATE_MIXED, PROBE)
UNPREPARED = "--pretraining-updates 0"
ALONE = f"{TEST_SEEDS} --log-every 5 --total-timesteps 1000000 {MIXED} --redraw never"
ONLINE = f"{TEST_SEEDS} --log-every 2 --total-timesteps 600000"
PREPARED_BEFORE = (vae(TEST_SEEDS), world(TEST_SEEDS))
PREPARATIONS = {
    "nothing watched": Run(f"{ONLINE} {UNPREPARED} --offline-ratio 0", then=MODELS),
    "no preparation": Run(f"{ONLINE} {UNPREPARED}", then=MODELS),
    "preparation (default)": Run(ONLINE, then=MODELS),
    "pretraining scripts": Run(f"{ONLINE} {UNPREPARED}", then=MODELS, before=PREPARED_BEFORE),
}
WALLS = f"{TEST_SEEDS} {LARGE} --max-wall-pieces 5"
PPO_WALLS = f"{WALLS} --log-every 5 --num-envs 1024 --method ppo --total-timesteps 4000000"
BEST_WALLS = "evaluation/adapt.py RUN --best-response-steps 4000000 --modes frozen learning"

# ---- How much imagination

DOSES = {  # flag -> its values, from little to much imagination; that of HOP+ among them
    "ppo-real-ratio": ("1", "0.5", "0.2", "0.05"),
    "imagined-weight": ("0.25", "1", "4"),
    "critic-data": ("real", "mixed"),
    "imagination-horizon": ("1", "4", "16", "32"),
}
HOPPLUS_DOSE = {
    "ppo-real-ratio": "0.2",
    "imagined-weight": "1",
    "critic-data": "mixed",
    "imagination-horizon": "16",
}
DOSE_STEPS = {"4x4": 500_000, "8x8": 1_000_000}


def dose_label(flag: str, value: str, board: str) -> str:
    """HOP+ itself where the flag has its default"""
    name = "HOP+" if value == HOPPLUS_DOSE[flag] else f"{flag} {value}"
    return label_of(name, board)


def dose_runs() -> dict[str, Run]:
    runs = {}
    for board, steps in DOSE_STEPS.items():
        flags = " ".join(f"{TEST_SEEDS} --log-every 2 {BOARDS[board]} --total-timesteps {steps}".split())
        runs[label_of("HOP+", board)] = Run(flags)
        for flag, values in DOSES.items():
            for value in values:
                if value != HOPPLUS_DOSE[flag]:
                    runs[dose_label(flag, value, board)] = Run(f"{flags} --{flag} {value}")
    return runs


# ---- Time and return: what decides in benchmarks/decisions.py, and how long it trains here


class Timed(NamedTuple):
    script: str
    flags: str
    pace: str  # what is fast trains for longer, so that it can be compared after equal time too


SEARCH_LABEL = "search"
TIMED = {
    "PPO": Timed(PPO, "--method ppo", "fast"),
    "PPO + subgoals": Timed(PPO, "--method ppo-omg", "fast"),
    "Direct-OM": Timed(PPO, "--method ppo-omg --subgoals actions", "fast"),
    "HOP+": Timed(PPO, "", "imagines"),
    SEARCH_LABEL: Timed(MCTS, "", "searches"),
    "search, one step": Timed(MCTS, "--planner one-step", "searches"),
    "search, Gumbel": Timed(MCTS, "--root gumbel", "searches"),
    "search, infers in the tree": Timed(MCTS, "--infer-in-tree", "searches"),
    "search, Direct-OM": Timed(MCTS, "--subgoals actions", "searches"),
    "HOP": Timed(MCTS, "--method hop", "searches"),
}
TIMED_STEPS = 122_880  # every run has a line there
TRAINING = {  # pace -> flags
    "fast": "--total-timesteps 1600000 --log-every 5 --learning-rate 5e-4",
    "imagines": "--total-timesteps 310000 --log-every 1",
    "searches": "--total-timesteps 122880 --log-every 1",
}


def timed_runs() -> dict[str, Run]:
    runs = {}
    for name, method in TIMED.items():
        words = f"{TEST_SEEDS} --num-envs 256 {TRAINING[method.pace]} {method.flags}".split()
        runs[name] = Run(" ".join(words), method.script)
    return runs


SECTIONS = {
    **ladder(),
    "more-updates": Section("The partner stays, 256 games at once", more_updates()),
    "3": Section(
        "VAE: reconstruction or action loss?",
        {
            loss: Run(SUBGOALS, then=(ADAPT,), before=(vae(f"{TEST_SEEDS} --loss {loss}"),))
            for loss in ("recon", "moa", "both")
        },
        ("before/probe_accuracy", "before/top1", "before/nll", "steps_to_2.8"),
        sets=("standard",),
    ),
    "6": Section(
        "Search",
        {
            "pUCT, 16 x 2 (default)": Run(SEARCH, MCTS),
            "Gumbel": Run(f"{SEARCH} --root gumbel", MCTS),
            "one step": Run(f"{SEARCH} --planner one-step", MCTS),
            "no search": Run(f"{SEARCH} --planner none", MCTS),
            "no search, learning rate 5e-4": Run(f"{SEARCH} --planner none --learning-rate 5e-4", MCTS),
            "4 simulations": Run(f"{SEARCH} --num-simulations 4", MCTS),
            "32 simulations": Run(f"{SEARCH} --num-simulations 32", MCTS),
        },
        ("steps_to_2.8", "fall"),
    ),
    "dose": Section("How much imagination?", dose_runs()),
    "7": Section(
        "Self-play, and what a part of HOP+ is worth",
        {
            **MEETING_RUNS,
            "HOP+, no memory": Run(f"{ABLATED} --memory-discount 0", then=(ADAPT,)),
            "HOP+, policy without subgoals": Run(f"{ABLATED} --subgoals none", then=(ADAPT,)),
            "PPO, few steps": Run(PPO_FEW),
            "PPO, few steps, 8x8": Run(PPO_FEW_8X8),
            "HOP+, few steps": Run(FEW),
            "few, discrete goals": Run(f"{FEW} --goal-kind discrete --goal-dim 8"),
            "few, 4 discrete goals": Run(f"{FEW} --goal-kind discrete --goal-dim 4"),
            "few, no subgoals": Run(f"{FEW} --subgoals none"),
            "PPO, 4h2s": Run(f"{TWO_STAGS} --method ppo {QUICK}"),
            "HOP+, 4h2s": Run(TWO_STAGS),
        },
        ("steps_to_2.8",),
        sets=("standard",),
    ),
    "others": Section("Learners that those of sections 7 and 8 meet", OTHER_RUNS, ("stag",)),
    "8": Section(
        "How well does a learner adapt to players nobody trained with?",
        MEETING_RUNS,
        sets=("strangers", "learned"),
    ),
    "time": Section(
        "Return after equal steps and after equal time",
        timed_runs(),
        ("steps_to_2.8", "all_seconds_to_2.8"),
        curves=True,
    ),
    "moa": Section(
        "How well does MOA predict each kind of co-player?",
        {
            "mixed": Run(ALONE, then=(EVALUATE,)),
            "mixed, no pretraining": Run(f"{ALONE} {UNPREPARED}", then=(EVALUATE,)),
            "self-play": PREPARATIONS["preparation (default)"],
            "self-play, no pretraining": PREPARATIONS["no preparation"],
        },
        moa=True,
    ),
    "pretraining": Section(
        "Does pretraining pay?",
        PREPARATIONS,
        ("steps_to_2.8", "all_steps_to_2.8", "all_seconds_to_2.8", "moa_gap", "after/probe"),
    ),
    "walls": Section(
        "Four players, 8x8, up to five wall pieces",
        {
            "PPO": Run(PPO_WALLS),
            "PPO, learning rate 3e-4": Run(f"{PPO_WALLS} --learning-rate 3e-4", then=(BEST_WALLS,)),
            "HOP+": Run(f"{WALLS} --log-every 5 --total-timesteps 4000000", then=(ADAPT,)),
            "HOP+ MCTS": Run(f"{WALLS} --log-every 2 --total-timesteps 240000", MCTS),
        },
        ("steps_to_2.8",),
        sets=("standard",),
        references=("walls",),
    ),
    # Without runs of its own, from the tables of sections 7 and 8
    "worst": Section("The worst case, from sections 7 and 8", {}),
}
