"""What experiments.py runs: sections, each with its runs and their flags."""

from typing import NamedTuple

PPO = "hopplus_ppo.py"
MCTS = "hopplus_mcts.py"
GRU = "benchmarks/baselines/ppo_gru.py"
VAE = "pretrain_vae.py"
OMG = "+ subgoals (OMG)"
SEARCH = "HOP+ with search"


class Run(NamedTuple):
    """In flags and commands @NAME is the folder of a run of section `first`"""

    script: str
    flags: str
    then: tuple[str, ...] = ()  # commands for its folder, RUN


class Section(NamedTuple):
    title: str
    runs: dict[str, Run]
    columns: tuple[str, ...] = ()  # of its table


TEST_SEEDS = "--seed 21 --num-seeds 5"
BOARDS = {"4x4": "", "8x8": "--height 8 --width 8"}


def label_of(name: str, board: str) -> str:
    return name if board == "4x4" else f"{name}, {board}"


def split_label(label: str) -> tuple[str, str]:
    """-> name, board"""
    name = label.removesuffix(", 8x8")
    return name, "4x4" if name == label else "8x8"


def join(*flags: str) -> str:
    return " ".join(" ".join(flags).split())


# ---- The worst case: learners that meet others
class Method(NamedTuple):
    script: str
    games: int
    steps: int
    flags: str = ""
    adapt: str = ""  # flags of adapt.py


# The policy itself trains with the players that models watch. Who has a memory keeps its co-players.
MIXED = "--seats learner,mixed,mixed,mixed"
MIXED_GRU = f"{MIXED} --population random,nearest_stag,nearest_hare --redraw never"
MIXED_OMG = f"--method ppo-omg {MIXED} --redraw never"
FAST = "--learning-rate 1e-3"  # alone with rule-based players
SLOW = "--learning-rate 3e-4"
SLOWEST = "--learning-rate 3e-5"  # with more, the recurrent ones forget faster than they learn


def methods(hopplus_steps: int, mixed_steps: int, rate: str) -> dict[str, Method]:
    return {
        "PPO": Method(PPO, 1024, 4_000_000, "--method ppo"),
        "PPO, mixed": Method(PPO, 1024, mixed_steps, f"--method ppo {rate} {MIXED}"),
        "GRU, mixed": Method(GRU, 1024, mixed_steps, f"{MIXED_GRU} {rate}", SLOWEST),
        "LIAM, mixed": Method(GRU, 1024, mixed_steps, f"--model liam {MIXED_GRU} {rate}", SLOWEST),
        f"{OMG}, mixed": Method(PPO, 1024, mixed_steps, f"{MIXED_OMG} {rate}"),
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


def method_run(method: Method, board: str, seeds: str, then: tuple[str, ...] = ()) -> Run:
    size = f"--num-envs {method.games} --total-timesteps {method.steps}"
    return Run(method.script, join(seeds, "--log-every 5", BOARDS[board], size, method.flags), then)


def method_runs() -> dict[str, Run]:
    """The references of a board are measured beside its PPO"""
    runs = {}
    for board, methods in METHODS.items():
        met = " ".join(f"{name}=@{name}-{board}" for name in OTHERS[board])
        for name, method in methods.items():
            command = join(BEST if name == "PPO" else ADAPT, method.adapt)
            then = (command, f"{command} --sets strangers", f"{command} --sets learned --others {met}")
            runs[label_of(name, board)] = method_run(method, board, TEST_SEEDS, then)
    return runs


def first_runs() -> dict[str, Run]:
    runs = {}
    for board, methods in OTHERS.items():
        for name, method in methods.items():
            seeds = "--seed 31 --num-seeds 1" if method.script == GRU else "--seed 31 --num-seeds 2"
            runs[f"{name}-{board}"] = method_run(method, board, seeds)
    for loss in ("recon", "moa", "both"):
        runs[f"vae-{loss}"] = Run(VAE, f"{TEST_SEEDS} --loss {loss}")
    return runs


WORST = method_runs()
LEARNED = {name: run._replace(then=()) for name, run in WORST.items()}  # the trainings alone


def unseen_runs() -> dict[str, Run]:
    """The references of a board are measured beside its HOP+"""
    runs = {}
    for board in BOARDS:
        for name in ("PPO, mixed", "GRU, mixed", "LIAM, mixed", "HOP+"):
            references = "--best-response-steps 8000000" if name == "HOP+" else "--no-references"
            label = label_of(name, board)
            command = join("benchmarks/unseen.py RUN", references, METHODS[board][name].adapt)
            runs[label] = LEARNED[label]._replace(then=(command,))
    return runs


# ---- Where knowing pays: one learner, whose partner is one of three; the others hunt hares
ARMS = {
    "PPO": (PPO, "--method ppo"),
    OMG: (PPO, "--method ppo-omg --subgoals inferred"),
    "GRU": (GRU, ""),
    "LIAM": (GRU, "--model liam"),
}
ARM = f"{TEST_SEEDS} --learning-rate 1e-3 --ent-coef 0.01 --log-every 5 --num-envs 256"  # of each of these
ONE = "--num-stags 2 --population first_stag,last_stag,nearest_hare --seats learner,mixed,nearest_hare,nearest_hare"
TASKS = {
    "4x4": f"--final-time 5 --redraw never {ONE} --total-timesteps 5000000",
    "8x8": f"{BOARDS['8x8']} --final-time 9 --redraw never {ONE} --total-timesteps 8000000",
}
# Those of the training, and partners whom nobody met there
PARTNERS = (
    "evaluation/partners.py RUN",
    "evaluation/partners.py RUN --population nearest_stag",
    "evaluation/partners.py RUN --population left_stag",
)
PARTNER_COLUMNS = ("game 1", "game 2", "games 3 to 20", "shuffled", "nearest_stag", "left_stag")


def partner_runs() -> dict[str, Run]:
    runs = {}
    for board, task in TASKS.items():
        for name, (script, flags) in ARMS.items():
            runs[label_of(name, board)] = Run(script, join(ARM, task, flags), PARTNERS)
        runs[label_of("HOP+", board)] = Run(PPO, f"{TEST_SEEDS} {task}", PARTNERS)
    return runs


# ---- How much imagination: each flag alone changed, "..." from the first
DOSES = (
    "--ppo-real-ratio 0.2",
    "... --imagined-weight 0.25",
    "... --imagined-weight 4",
    "... --critic-data real",
    "... --imagination-horizon 1",
    "... --imagination-horizon 4",
    "... --imagination-horizon 32",
    "--ppo-real-ratio 0.05",
    "--ppo-real-ratio 0.5",
    "--ppo-real-ratio 1",
)
DOSE_STEPS = {"4x4": 500_000, "8x8": 1_000_000}


def dose_runs() -> dict[str, Run]:
    runs = {}
    for board, steps in DOSE_STEPS.items():
        for name in DOSES:
            own = name.replace("...", DOSES[0])
            flags = join(TEST_SEEDS, "--log-every 2", BOARDS[board], f"--total-timesteps {steps}", own)
            runs[label_of(name, board)] = Run(PPO, flags)
    return runs


# ---- Search; `speed.py --cases decisions` measures the same methods
SEARCHED = {  # script, flags, pace
    "PPO": (PPO, "--method ppo", "fast"),
    OMG: (PPO, "--method ppo-omg", "fast"),
    "HOP+": (PPO, "", "imagines"),
    SEARCH: (MCTS, "", "searches"),
    "... Gumbel at the root": (MCTS, "--root gumbel", "searches"),
    "... 4 simulations": (MCTS, "--num-simulations 4", "searches"),
    "... 32 simulations": (MCTS, "--num-simulations 32", "searches"),
    "... one step ahead": (MCTS, "--planner one-step", "searches"),
    "... no search": (MCTS, "--planner none", "searches"),
    "... no search, learning rate 5e-4": (MCTS, "--planner none --learning-rate 5e-4", "searches"),
    "HOP": (MCTS, "--method hop", "searches"),
}
PACES = {
    "fast": "--total-timesteps 1600000 --log-every 5 --learning-rate 5e-4",
    "imagines": "--total-timesteps 310000 --log-every 1",
    "searches": "--total-timesteps 122880 --log-every 1",
}


def searched_runs() -> dict[str, Run]:
    runs = {}
    for name, (script, flags, pace) in SEARCHED.items():
        runs[name] = Run(script, join(TEST_SEEDS, "--num-envs 256", PACES[pace], flags))
    return runs


# ---- The other questions
LARGE = BOARDS["8x8"]
FEW_GAMES = "--num-envs 256 --learning-rate 5e-4"  # PPO with few steps
FEW_GAMES_8X8 = "--num-envs 256 --learning-rate 1e-4"  # with 5e-4 it would end with hares
QUICK = f"{TEST_SEEDS} --log-every 2"
WALLS = f"{TEST_SEEDS} {LARGE} --max-wall-pieces 5"
PPO_WALLS = f"{WALLS} --log-every 5 --num-envs 1024 --method ppo --total-timesteps 4000000"
SUBGOALS = f"{QUICK} --total-timesteps 300000 --method ppo-omg {FEW_GAMES}"
ALONE = f"{TEST_SEEDS} --log-every 5 --total-timesteps 1000000 {MIXED} --redraw never"
EVALUATE = "evaluation/evaluate.py RUN"
ONLINE = f"{QUICK} --total-timesteps 600000"
UNPREPARED = "--pretraining-updates 0"
PREPARED = Run(PPO, ONLINE, (EVALUATE, f"{EVALUATE} {MIXED}"))
SMALL = f"{QUICK} --total-timesteps 100000 --num-envs 64"

STEPS = ("steps_to_2.8", "return")
WATCHED = ("steps_to_2.8", "watched_to_2.8", "return")
SECONDS = ("steps_to_2.8", "watched_to_2.8", "seconds_to_2.8", "return")
SECTIONS = {
    "first": Section("What other sections start from, or meet: to be run before these", first_runs()),
    "worst": Section("How bad can it get in a new team?", WORST),
    "unseen": Section("Players written afterwards", unseen_runs()),
    "partners": Section("Where does it pay to know a partner?", partner_runs(), PARTNER_COLUMNS),
    "self-play": Section(
        "Does HOP+ need fewer real steps in self-play?",
        {
            "PPO, 1 024 games": LEARNED["PPO"],
            "PPO, 256 games": Run(PPO, f"{QUICK} --method ppo --total-timesteps 600000 {FEW_GAMES}"),
            "HOP+, 256 games": LEARNED["HOP+"],
            "PPO, 1 024 games, 8x8": LEARNED["PPO, 8x8"],
            "PPO, 256 games, 8x8": Run(PPO, f"{QUICK} {LARGE} --method ppo --total-timesteps 2000000 {FEW_GAMES_8X8}"),
            "HOP+, 256 games, 8x8": LEARNED["HOP+, 8x8"],
        },
        WATCHED,
    ),
    "walls": Section(
        "And on a board with walls?",
        {
            "PPO": Run(PPO, PPO_WALLS),
            "PPO, learning rate 3e-4": Run(PPO, f"{PPO_WALLS} {SLOW}"),
            "HOP+": Run(PPO, f"{WALLS} --log-every 5 --total-timesteps 4000000"),
            SEARCH: Run(MCTS, f"{WALLS} --log-every 2 --total-timesteps 240000"),
        },
        STEPS,
    ),
    "imagination": Section("How much imagination?", dose_runs(), STEPS),
    "vae": Section(
        "Should the VAE learn to rebuild boards, or to predict actions?",
        {f"--loss {x}": Run(PPO, f"{SUBGOALS} --vae-checkpoint @vae-{x}") for x in ("recon", "moa", "both")},
        STEPS,
    ),
    "moa": Section(
        "How well does MOA predict each kind of co-player?",
        {
            "MOA trained beside it": Run(PPO, ALONE, (EVALUATE,)),
            "MOA trained in self-play": PREPARED,
        },
    ),
    "pretraining": Section(
        "Does pretraining pay?",
        {
            "watches nothing": Run(PPO, f"{ONLINE} {UNPREPARED} --offline-ratio 0"),
            "watches during training": Run(PPO, f"{ONLINE} {UNPREPARED}"),
            "watches before and during training (default)": PREPARED,
        },
        (*SECONDS, "moa_gap"),
    ),
    "search": Section("Does search help?", searched_runs(), SECONDS),
    "goals": Section(
        "What if subgoals are discrete, or missing, or there is no memory?",
        {
            "HOP+, 64 games": Run(PPO, SMALL),
            "... 8 discrete subgoals": Run(PPO, f"{SMALL} --goal-kind discrete --goal-dim 8"),
            "... 4 discrete subgoals": Run(PPO, f"{SMALL} --goal-kind discrete --goal-dim 4"),
            "... policy reads no subgoals": Run(PPO, f"{SMALL} --subgoals none"),
            "HOP+, 256 games": LEARNED["HOP+"],
            "... no memory": Run(PPO, f"{WORST['HOP+'].flags} --memory-discount 0"),
        },
        STEPS,
    ),
}
