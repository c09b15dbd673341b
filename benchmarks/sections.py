"""What experiments.py runs: sections, each with its runs and their flags."""

import dataclasses
from typing import NamedTuple

PPO = "hopplus_ppo.py"
MCTS = "hopplus_mcts.py"
GRU = "benchmarks/baselines/ppo_gru.py"


@dataclasses.dataclass(frozen=True)
class Run:
    flags: str
    script: str = PPO
    before: tuple[str, ...] = ()  # commands whose checkpoints the flags name: BEFORE_0, BEFORE_1
    then: tuple[str, ...] = ()  # commands for its folder, RUN; OTHERS_4x4: those of section `others`


class Section(NamedTuple):
    title: str
    runs: dict[str, Run]
    columns: tuple[str, ...] = ()  # what its table says of each run beside the return


TEST_SEEDS = "--seed 11 --num-seeds 5"
BOARDS = {"4x4": "", "8x8": "--height 8 --width 8"}


def label_of(name: str, board: str) -> str:
    """The name in tables: of the larger board it says so"""
    return name if board == "4x4" else f"{name}, {board}"


def board_of(label: str) -> str:
    return "8x8" if label.endswith("8x8") else "4x4"


def join(*flags: str) -> str:
    return " ".join(" ".join(flags).split())


# ---- Learners that meet others
class Method(NamedTuple):
    script: str
    games: int
    steps: int
    flags: str = ""


# The policy itself trains with the players that models watch. Who has a memory keeps its co-players.
MIXED = "--seats learner,mixed,mixed,mixed"
MIXED_GRU = f"{MIXED} --population random,nearest_stag,nearest_hare --redraw never"
MIXED_OMG = f"--method ppo-omg {MIXED} --redraw never"
FAST = "--learning-rate 1e-3"  # alone with rule-based players
SLOW = "--learning-rate 3e-4"


def methods(hopplus_steps: int, mixed_steps: int, rate: str) -> dict[str, Method]:
    return {
        "PPO": Method(PPO, 1024, 4_000_000, "--method ppo"),
        "PPO, mixed": Method(PPO, 1024, mixed_steps, f"--method ppo {rate} {MIXED}"),
        "GRU, mixed": Method(GRU, 1024, mixed_steps, f"{MIXED_GRU} {rate}"),
        "+ subgoals, mixed": Method(PPO, 1024, mixed_steps, f"{MIXED_OMG} {rate}"),
        "HOP+": Method(PPO, 256, hopplus_steps),
    }


METHODS = {"4x4": methods(2_000_000, 5_000_000, FAST), "8x8": methods(4_000_000, 13_000_000, SLOW)}


def others(board: str, hare_steps: int, early_steps: int, early_rate: str) -> dict[str, Method]:
    """Whom they meet. One learned beside hare hunters to hunt hares, one has just begun"""
    hares = f"--method ppo {FAST} --seats learner,nearest_hare,nearest_hare,nearest_hare"
    return {
        "PPO": METHODS[board]["PPO"],
        "HOP+": METHODS[board]["HOP+"],
        "hares": Method(PPO, 1024, hare_steps, hares),
        "early": Method(PPO, 1024, early_steps, f"--method ppo {early_rate}"),
        "GRU": Method(GRU, 1024, 3_000_000, MIXED_GRU),
    }


OTHERS = {
    "4x4": others("4x4", 1_000_000, 600_000, FAST),
    "8x8": others("8x8", 2_000_000, 1_200_000, SLOW),
}
ADAPT = "evaluation/adapt.py RUN --no-references"
BEST = "evaluation/adapt.py RUN --best-response-steps 8000000"


def method_flags(method: Method, board: str, seeds: str) -> str:
    size = f"--num-envs {method.games} --total-timesteps {method.steps}"
    return join(seeds, "--log-every 5", BOARDS[board], size, method.flags)


def method_runs() -> dict[str, Run]:
    """The references of a board are measured beside its PPO"""
    runs = {}
    for board, methods in METHODS.items():
        for name, method in methods.items():
            command = BEST if name == "PPO" else ADAPT
            learned = f"{command} --sets learned --others OTHERS_{board}"
            then = (command, f"{command} --sets strangers", learned)
            flags = method_flags(method, board, TEST_SEEDS)
            runs[label_of(name, board)] = Run(flags, method.script, then=then)
    return runs


def other_runs(board: str) -> dict[str, Run]:
    runs = {}
    for name, method in OTHERS[board].items():
        seeds = "--seed 31 --num-seeds 1" if method.script == GRU else "--seed 31 --num-seeds 2"
        runs[name] = Run(method_flags(method, board, seeds), method.script)
    return runs


MEETING_RUNS = method_runs()
OTHER_RUNS = {label_of(name, board): run for board in BOARDS for name, run in other_runs(board).items()}

# ---- Where knowing pays: one learner, whose partner is one of three; the others hunt hares
LADDER = f"{TEST_SEEDS} --learning-rate 1e-3 --ent-coef 0.01 --log-every 5"  # of every arm
ARMS = {  # what the policy may know: script and flags
    "none": (PPO, "--method ppo"),
    "actions": (PPO, "--method ppo-omg --subgoals actions"),
    "inferred": (PPO, "--method ppo-omg --subgoals inferred"),
    "GRU": (GRU, ""),
}
ONE = "--num-stags 2 --population first_stag,last_stag,nearest_hare --seats learner,mixed,nearest_hare,nearest_hare"
TASKS = {  # board -> title, flags, steps
    "8x8": ("8x8, 9 steps, the partner stays", f"{BOARDS['8x8']} --final-time 9 --redraw never {ONE}", 8_000_000),
    "4x4": ("4x4, 5 steps, the partner stays", f"--final-time 5 --redraw never {ONE}", 5_000_000),
}
PARTNERS = "evaluation/partners.py RUN"
# Those of the training, and partners whom nobody met there
MEET_PARTNERS = (PARTNERS, *(f"{PARTNERS} --population {name}" for name in ("nearest_stag", "left_stag")))


def arms(board: str, games: int, names, then: tuple[str, ...]) -> dict[str, Run]:
    _, flags, steps = TASKS[board]
    runs = {}
    for name in names:
        script, own = ARMS[name]
        words = join(LADDER, f"--num-envs {games}", flags, f"--total-timesteps {steps}", own)
        runs[name] = Run(words, script, then=then)
    return runs


def ladder(board: str) -> Section:
    title, flags, steps = TASKS[board]
    hopplus = Run(f"{TEST_SEEDS} {flags} --total-timesteps {steps}", then=MEET_PARTNERS)
    return Section(title, arms(board, 1024, ARMS, MEET_PARTNERS) | {"HOP+": hopplus})


def more_updates() -> dict[str, Run]:
    """With as many games at once as HOP+: a quarter of the ladder's, so four times the updates"""
    runs = {}
    for board in BOARDS:
        for name, run in arms(board, 256, ("none", "inferred", "GRU"), (PARTNERS,)).items():
            runs[label_of(name, board)] = run
    return runs


# ---- How much imagination
DOSES = {  # flag -> its values, from little to much imagination
    "ppo-real-ratio": ("1", "0.5", "0.2", "0.05"),
    "imagined-weight": ("0.25", "1", "4"),
    "critic-data": ("real", "mixed"),
    "imagination-horizon": ("1", "4", "16", "32"),
}
HOPPLUS_DOSE = {"ppo-real-ratio": "0.2", "imagined-weight": "1", "critic-data": "mixed", "imagination-horizon": "16"}
DOSE_STEPS = {"4x4": 500_000, "8x8": 1_000_000}


def dose_label(flag: str, value: str, board: str) -> str:
    return label_of("HOP+" if value == HOPPLUS_DOSE[flag] else f"{flag} {value}", board)


def dose_runs() -> dict[str, Run]:
    """Each flag alone changed"""
    runs = {}
    base = f"--ppo-real-ratio {HOPPLUS_DOSE['ppo-real-ratio']}"
    for board, steps in DOSE_STEPS.items():
        flags = join(TEST_SEEDS, "--log-every 2", BOARDS[board], f"--total-timesteps {steps}")
        runs[label_of("HOP+", board)] = Run(f"{flags} {base}")
        for flag, values in DOSES.items():
            for value in values:
                if value != HOPPLUS_DOSE[flag]:
                    own = f"--{flag} {value}" if flag == "ppo-real-ratio" else f"--{flag} {value} {base}"
                    runs[dose_label(flag, value, board)] = Run(f"{flags} {own}")
    return runs


# ---- Time and return; `speed.py --cases decisions` measures the same methods
TIMED = {  # script, flags, pace
    "PPO": (PPO, "--method ppo", "fast"),
    "PPO + subgoals": (PPO, "--method ppo-omg", "fast"),
    "Direct-OM": (PPO, "--method ppo-omg --subgoals actions", "fast"),
    "HOP+": (PPO, "", "imagines"),
    "search": (MCTS, "", "searches"),
    "search, one step": (MCTS, "--planner one-step", "searches"),
    "search, Gumbel": (MCTS, "--root gumbel", "searches"),
    "search, infers in the tree": (MCTS, "--infer-in-tree", "searches"),
    "search, Direct-OM": (MCTS, "--subgoals actions", "searches"),
    "HOP": (MCTS, "--method hop", "searches"),
}
TIMED_STEPS = 122_880  # every run has a line there
PACES = {  # what is fast trains for longer, so that it can be compared after equal time too
    "fast": "--total-timesteps 1600000 --log-every 5 --learning-rate 5e-4",
    "imagines": "--total-timesteps 310000 --log-every 1",
    "searches": "--total-timesteps 122880 --log-every 1",
}


def timed_runs() -> dict[str, Run]:
    runs = {}
    for name, (script, flags, pace) in TIMED.items():
        runs[name] = Run(join(TEST_SEEDS, "--num-envs 256", PACES[pace], flags), script)
    return runs


# ---- The other questions
LARGE = BOARDS["8x8"]
QUICK = "--num-envs 256 --learning-rate 5e-4"  # PPO with few steps
QUICK_8X8 = "--num-envs 256 --learning-rate 1e-4"  # with 5e-4 it would end with hares
SUBGOALS = f"{TEST_SEEDS} --log-every 2 --total-timesteps 300000 --method ppo-omg {QUICK}"
SEARCH = f"{TEST_SEEDS} --num-envs 256 --total-timesteps 122880 --log-every 1"
FEW = f"{TEST_SEEDS} --log-every 2 --total-timesteps 100000 --num-envs 64"
TWO_STAGS = f"{TEST_SEEDS} --log-every 2 --total-timesteps 1000000 --num-stags 2"
ABLATED = MEETING_RUNS["HOP+"].flags
EVALUATE = "evaluation/evaluate.py RUN"
UNPREPARED = "--pretraining-updates 0"
ALONE = f"{TEST_SEEDS} --log-every 5 --total-timesteps 1000000 {MIXED} --redraw never"
ONLINE = f"{TEST_SEEDS} --log-every 2 --total-timesteps 600000"
MODELS = (EVALUATE, f"{EVALUATE} {MIXED}")
PREPARED_BEFORE = (f"pretrain_vae.py {TEST_SEEDS}", f"pretrain_world_model.py {TEST_SEEDS}")
PREPARED = "--vae-checkpoint BEFORE_0 --world-model-checkpoint BEFORE_1"
PREPARATIONS = {
    "nothing watched": Run(f"{ONLINE} {UNPREPARED} --offline-ratio 0", then=MODELS),
    "no preparation": Run(f"{ONLINE} {UNPREPARED}", then=MODELS),
    "preparation (default)": Run(ONLINE, then=MODELS),
    "pretraining scripts": Run(f"{ONLINE} {UNPREPARED} {PREPARED}", then=MODELS, before=PREPARED_BEFORE),
}
WALLS = f"{TEST_SEEDS} {LARGE} --max-wall-pieces 5"
PPO_WALLS = f"{WALLS} --log-every 5 --num-envs 1024 --method ppo --total-timesteps 4000000"
BEST_WALLS = "evaluation/adapt.py RUN --best-response-steps 4000000"


def vae_run(loss: str) -> Run:
    before = f"pretrain_vae.py {TEST_SEEDS} --loss {loss}"
    return Run(f"{SUBGOALS} --vae-checkpoint BEFORE_0", then=(ADAPT,), before=(before,))


SECTIONS = {
    "stays-8x8": ladder("8x8"),
    "stays-4x4": ladder("4x4"),
    "more-updates": Section("The partner stays, 256 games at once", more_updates()),
    "3": Section(
        "VAE: reconstruction or action loss?",
        {loss: vae_run(loss) for loss in ("recon", "moa", "both")},
        ("before/top1", "before/nll", "steps_to_2.8"),
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
    "dose": Section(
        "How much imagination?",
        dose_runs(),
        ("steps_to_2.8", "real_samples", "imagined_samples"),
    ),
    "7": Section(
        "Self-play, what a part of HOP+ is worth, and the worst case beside players nobody trained with",
        {
            **MEETING_RUNS,
            "HOP+, no memory": Run(f"{ABLATED} --memory-discount 0", then=(ADAPT,)),
            "HOP+, policy without subgoals": Run(f"{ABLATED} --subgoals none", then=(ADAPT,)),
            "PPO, few steps": Run(f"{TEST_SEEDS} --log-every 2 --method ppo --total-timesteps 600000 {QUICK}"),
            "PPO, few steps, 8x8": Run(
                f"{TEST_SEEDS} --log-every 2 {LARGE} --method ppo --total-timesteps 2000000 {QUICK_8X8}"
            ),
            "HOP+, few steps": Run(FEW),
            "few, discrete goals": Run(f"{FEW} --goal-kind discrete --goal-dim 8"),
            "few, 4 discrete goals": Run(f"{FEW} --goal-kind discrete --goal-dim 4"),
            "few, no subgoals": Run(f"{FEW} --subgoals none"),
            "PPO, 4h2s": Run(f"{TWO_STAGS} --method ppo {QUICK}"),
            "HOP+, 4h2s": Run(TWO_STAGS),
        },
        ("steps_to_2.8",),
    ),
    "others": Section("Learners that those of section 7 meet", OTHER_RUNS, ("stag",)),
    "time": Section(
        "Return after equal steps and after equal time",
        timed_runs(),
        ("steps_to_2.8", "all_seconds_to_2.8"),
    ),
    "moa": Section(
        "How well does MOA predict each kind of co-player?",
        {
            "mixed": Run(ALONE, then=(EVALUATE,)),
            "mixed, no pretraining": Run(f"{ALONE} {UNPREPARED}", then=(EVALUATE,)),
            "self-play": PREPARATIONS["preparation (default)"],
            "self-play, no pretraining": PREPARATIONS["no preparation"],
        },
    ),
    "pretraining": Section(
        "Does pretraining pay?",
        PREPARATIONS,
        ("steps_to_2.8", "all_steps_to_2.8", "all_seconds_to_2.8", "moa_gap", "after/probe", "after/probe_majority"),
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
    ),
}
