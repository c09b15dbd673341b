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
    references: tuple[str, ...] = ("7", "8")  # sections whose random players and best responses are 0 and 1


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
SEARCH_ADAPT = "evaluation/adapt.py RUN --no-references --modes frozen search learning"
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
    "posterior": (PPO, "--method ppo-omg --subgoals posterior"),
    "told": (PPO, "--method ppo-omg --subgoals oracle"),
}
HOPPLUS_TASKS = ("stays-8x8", "stays-4x4", "redrawn-4x4")  # where HOP+ is an arm, too
PARTNERS = "evaluation/partners.py RUN"
STRANGE_PARTNERS = ("nearest_stag", "left_stag")  # whom nobody met in training
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


def partner_commands(task: str) -> tuple[str, ...]:
    """Games with the partners of the training; where these stay, also with partners of a new kind"""
    if "drifts" in task:
        return (PARTNERS,)
    if "stays" not in task:
        return ()
    strange = (f"{PARTNERS} --population {name}" for name in STRANGE_PARTNERS)
    return PARTNERS, *strange


def arms(task: str) -> dict[str, Run]:
    """What the policy may know, in one game"""
    game_flags = f"{TASKS[task].flags} --total-timesteps {TASKS[task].steps}"
    names = tuple(ARMS)
    if "4x4" not in task and "stays" not in task:
        names = ("none", "inferred", "told")
    runs = {}
    for name in names:
        script, flags = ARMS[name]
        flags = f"{LADDER} --num-envs {LADDER_GAMES} {game_flags} {flags}".rstrip()
        runs[name] = Run(flags, script, then=partner_commands(task))
    if task in HOPPLUS_TASKS:
        runs["HOP+"] = Run(f"{TEST_SEEDS} {game_flags}", then=partner_commands(task))
    return runs


def more_updates() -> dict[str, Run]:
    """With as many games at once as HOP+: a quarter of the ladder's, so four times the updates"""
    runs = {}
    for board in BOARDS:
        task = TASKS[f"stays-{board}"]
        for name in ("none", "inferred", "GRU", "posterior"):
            script, flags = ARMS[name]
            words = f"{LADDER} --num-envs 256 {task.flags} --total-timesteps {task.steps} {flags}".split()
            runs[label_of(name, board)] = Run(" ".join(words), script, then=(PARTNERS,))
    return runs


def ladder() -> dict[str, Section]:
    panels = [("points", "return"), ("late curves", "return"), ("together", "")]
    return {name: Section(task.title, arms(name), panels) for name, task in TASKS.items()}


# ---- The other questions


def vae(flags: str) -> tuple[str, str, str]:
    return "pretrain_vae.py", flags, "--vae-checkpoint"


def world(flags: str) -> tuple[str, str, str]:
    return "pretrain_world_model.py", flags, "--world-model-checkpoint"


SEEDS5 = f"{TEST_SEEDS} --log-every 2"
SEEDS8 = "--seed 11 --num-seeds 8 --log-every 2"
SHORT = f"{SEEDS5} --total-timesteps 300000"
BRIEF = f"{SEEDS5} --total-timesteps 150000"
# PPO with few steps; with 5e-4 it would end with hares on 8x8
QUICK = "--num-envs 256 --learning-rate 5e-4"
QUICK_8X8 = "--num-envs 256 --learning-rate 1e-4"
SUBGOALS = f"{SHORT} --method ppo-omg {QUICK}"
UNCHECKED = "--trust-exact-match 0"
BADLY = f"{UNCHECKED} --imagination-horizon 32 --gae-lambda 1 --ppo-real-ratio 0.1"
INSIDE = f"{SHORT} {UNCHECKED} --ppo-real-ratio 0.05"
PPO_SEATS = f"{SEEDS8} --method ppo --total-timesteps 600000 {QUICK}"
SEARCH = f"{TEST_SEEDS} --num-envs 256 --total-timesteps 122880 --log-every 1"
UNTRAINED = f"{SEEDS8} --total-timesteps 120000 --pretraining-updates 0 --offline-ratio 0 --search-model env"
FEW = f"{TEST_SEEDS} --log-every 2 --total-timesteps 100000 --num-envs 64"
PPO_FEW = f"{TEST_SEEDS} --log-every 2 --method ppo --total-timesteps 600000 {QUICK}"
PPO_FEW_8X8 = f"{TEST_SEEDS} --log-every 2 {LARGE} --method ppo --total-timesteps 2000000 {QUICK_8X8}"
TWO_STAGS = f"{TEST_SEEDS} --log-every 2 --total-timesteps 1000000 --num-stags 2"
ABLATED = method_flags(METHODS["4x4"]["HOP+"], "4x4", TEST_SEEDS)

# ---- What the models know: sections moa, pretraining and walls

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

# ---- The value loss: an earlier implementation's settings and mistakes

VALUE_SETTINGS = {
    "HOP+, imagined for the actor alone": Run(f"{SHORT} --critic-data real"),
    "HOP+, Monte Carlo returns": Run(f"{SHORT} --gae-lambda 1"),
    "HOP+, subgoals zeroed": Run(SHORT, patch=("zero_subgoals",)),
    "HOP+, pixel head, unchecked": Run(f"{SHORT} {UNCHECKED}", patch=("pixel", "unclipped")),
    "HOP+, old settings": Run(f"{SHORT} {BADLY}", patch=("unclipped",)),
}
VALUE_MISTAKES = {
    "player 1's reward": "reward_of_player_1",
    "replayed": "replayed",
    "no ends": "no_ends",
    "all legal": "all_legal",
}
# In seat 4: in seat 1 a learner is player 1.
ONE_LEARNER = "--seats nearest_stag,nearest_stag,nearest_stag,learner"


def value_loss_runs(place: str, seats: str) -> dict[str, Run]:
    """Plain PPO and HOP+, each mistake alone, all of them; where PPO has nothing to imagine, two"""
    ppo = f"{SHORT} --method ppo {QUICK} {seats}".rstrip()
    hopplus = f"{SHORT} {seats}".rstrip()
    old_settings = f"{hopplus} {BADLY} --pretraining-updates 50"
    every_mistake = tuple(VALUE_MISTAKES.values())
    runs = {f"PPO{place}": Run(ppo)}
    for label in ("player 1's reward", "replayed"):
        runs[f"PPO{place}, {label}"] = Run(ppo, patch=(VALUE_MISTAKES[label],))
    runs[f"HOP+{place}"] = Run(hopplus)
    for label, mistake in VALUE_MISTAKES.items():
        runs[f"HOP+{place}, {label}"] = Run(hopplus, patch=(mistake,))
    runs[f"HOP+{place}, all four"] = Run(hopplus, patch=every_mistake)
    runs[f"HOP+{place}, all four, old settings, pixel head"] = Run(
        old_settings,
        patch=("pixel", "unclipped", *every_mistake),
    )
    return runs


# ---- Who joins the stag

MILLION = f"{SEEDS5} --total-timesteps 1000000"
FEW_SIMULATIONS = f"{MILLION} --num-simulations 4"  # a third of the time
HOP = f"{MILLION} --method hop"


def counted(flags: str, *mistakes: str) -> Run:
    """A run of search that also logs how many take the stag"""
    return Run(flags, MCTS, patch=("party_sizes", *mistakes))


PARTY_RUNS = {
    "search": counted(MILLION),
    "HOP": counted(HOP),
    "HOP, only player 1's MOA learns": counted(HOP, "moa_of_player_1"),
    "HOP, unmasked": counted(HOP, "unmasked"),
    "search, 4 simulations": counted(FEW_SIMULATIONS),
    "search, 4 simulations, only player 1's MOA learns": counted(FEW_SIMULATIONS, "moa_of_player_1"),
    "search, 4 simulations, actions permuted, unmasked": counted(FEW_SIMULATIONS, "permuted_actions", "unmasked"),
    "search, 4 simulations, all steps": counted(FEW_SIMULATIONS, "all_steps"),
    "search, 4 simulations, rewarded": counted(FEW_SIMULATIONS, "rewarded"),
    "search, 4 simulations, player 1's reward": counted(FEW_SIMULATIONS, "reward_of_player_1"),
    # Of three who share a stag each gets 3.3: here a hare pays more, but less than half a stag.
    "search, 4 simulations, a hare pays 4": counted(f"{FEW_SIMULATIONS} --hare-reward 4"),
}

# A third of the stag is 3.3, half of it 5.
PARTY_RUNS_CPU = {
    "a hare pays 1": counted(f"{TEST_SEEDS} --device cpu --total-timesteps 120000"),
    "a hare pays 3.4": counted(f"{TEST_SEEDS} --device cpu --total-timesteps 120000 --hare-reward 3.4"),
}

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


# ---- HOP with the values that its authors are reported to have used, on their board too

# Their Q is in the game's units, ours in units of the highest payoff, 5 (a stag shared by two):
# their temperature of 2 is 10 here, their pUCT constant of 1 is 0.2.
AUTHORS_ONE_BY_ONE = {
    "beta 10": "--q-temperature 10",
    "pUCT 0.2": "--puct 0.2",
    "gamma 0.95": "--gamma 0.95",
    "memory 0.995": "--memory-discount 0.995",
}
ALL_FOUR = " ".join(AUTHORS_ONE_BY_ONE.values())
AUTHORS_VALUES = f"--num-trees 5 --num-simulations 200 {ALL_FOUR}"
AUTHORS_BOARD = "--height 8 --width 8 --max-wall-pieces 5"
HOP_BOARDS = {"4x4": "", "8x8": AUTHORS_BOARD}
HOP_STEPS = "--num-envs 256 --total-timesteps 1000000 --log-every 3 --compile"
THREE_SEEDS = "--seed 11 --num-seeds 3"  # where runs take their time
HOP_ARMS = {  # seeds, flags
    "HOP": (TEST_SEEDS, "--method hop"),
    "HOP, authors' values": (THREE_SEEDS, f"--method hop {AUTHORS_VALUES}"),
    "HOP+ MCTS": (TEST_SEEDS, ""),
}


def hop_runs() -> dict[str, Run]:
    runs = {}
    for board, board_flags in HOP_BOARDS.items():
        for name, (seeds, flags) in HOP_ARMS.items():
            words = f"{seeds} {HOP_STEPS} {board_flags} {flags}".split()
            runs[label_of(name, board)] = Run(" ".join(words), MCTS)
    return runs


HOP_CPU = f"{TEST_SEEDS} --device cpu --total-timesteps 61440 --log-every 2 --method hop"


def hop_runs_cpu() -> dict[str, Run]:
    """With our values, with one of the authors', with more of them; as many simulations in all"""
    beta, puct, gamma, memory = AUTHORS_ONE_BY_ONE.values()
    arms = {
        "HOP": "",
        **{f"HOP, {name}": flags for name, flags in AUTHORS_ONE_BY_ONE.items()},
        "HOP, all but beta": f"{puct} {gamma} {memory}",
        "HOP, beta and gamma": f"{beta} {gamma}",
        "HOP, all four": ALL_FOUR,
    }
    return {name: Run(f"{HOP_CPU} {flags}".rstrip(), MCTS) for name, flags in arms.items()}


# ---- Time and return: what decides in benchmarks/decisions.py, and how long it trains here


class Timed(NamedTuple):
    script: str
    flags: str
    pace: str  # what is fast trains for longer, so that it can be compared after equal time too


class Timing(NamedTuple):
    """On one kind of machine"""

    flags: str  # of all runs
    same_steps: int  # every run has a line there
    training: dict[str, str]  # pace -> flags
    decisions: str  # table of benchmarks/decisions.py in docs/data


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
TIMINGS = {  # section -> how it is run
    "time": Timing(
        f"{TEST_SEEDS} --num-envs 256",
        122_880,
        {
            "fast": "--total-timesteps 1600000 --log-every 5 --learning-rate 5e-4",
            "imagines": "--total-timesteps 310000 --log-every 1",
            "searches": "--total-timesteps 122880 --log-every 1",
        },
        "decisions_gpu.csv",
    ),
    "time-cpu": Timing(
        f"{THREE_SEEDS} --device cpu",
        40_960,
        {
            "fast": "--total-timesteps 655360 --log-every 5",
            "imagines": "--total-timesteps 122880 --log-every 2",
            "searches": "--total-timesteps 40960 --log-every 1",
        },
        "decisions_cpu.csv",
    ),
}
TIMED_PANELS = [
    ("curves", "return"),
    ("curves over all seconds", "return"),
    ("bars", "steps_to_2.8"),
    ("bars", "all_seconds_to_2.8"),
]


def timed_runs(timing: Timing) -> dict[str, Run]:
    runs = {}
    for name, method in TIMED.items():
        words = f"{timing.flags} {timing.training[method.pace]} {method.flags}".split()
        runs[name] = Run(" ".join(words), method.script)
    return runs


SECTIONS = {
    **ladder(),
    "more-updates": Section(
        "The partner stays, 256 games at once",
        more_updates(),
        [("points", "return"), ("late curves", "return"), ("together", "")],
    ),
    "1": Section(
        "Why was the value loss so high, and in which seat?",
        value_loss_runs("", "") | VALUE_SETTINGS | value_loss_runs(", one learner", ONE_LEARNER),
        [
            ("bars", "value_real"),
            ("bars", "value_real_peak"),
            ("bars", "return"),
            ("seats", "value_real"),
            ("seats", "explained_variance"),
            ("seats", "player"),
        ],
    ),
    "2": Section(
        "Was player 1 favoured?",
        {
            "PPO": Run(PPO_SEATS),
            "PPO, shared": Run(f"{PPO_SEATS} --share-parameters"),
            "PPO, cells permuted": Run(f"{PPO_SEATS} --permute-ids"),
            "PPO, learners change seats": Run(PPO_SEATS, patch=("permuted_seats",)),
            "PPO with subgoals": Run(f"{SEEDS8} --method ppo-omg --total-timesteps 600000 {QUICK}"),
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
        {
            loss: Run(SUBGOALS, then=(ADAPT,), before=(vae(f"{TEST_SEEDS} --loss {loss}"),))
            for loss in ("recon", "moa", "both")
        },
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
            "pixel": Run(INSIDE, before=(world(f"{TEST_SEEDS} --wm-head pixel"),), patch=("pixel",)),
            "pixel, weighted": Run(
                INSIDE,
                before=(world(f"{TEST_SEEDS} --wm-head pixel --wm-channel-weights 2 2 2 2 1 1 1"),),
                patch=("pixel_weighted",),
            ),
            "structured": Run(INSIDE, before=(world(TEST_SEEDS),)),
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
            "MCTS": Run(SEARCH, MCTS),
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
            "pUCT, 16 x 2 (default)": Run(SEARCH, MCTS),
            "Gumbel": Run(f"{SEARCH} --root gumbel", MCTS),
            "one step": Run(f"{SEARCH} --planner one-step", MCTS),
            "no search": Run(f"{SEARCH} --planner none", MCTS),
            "no search, learning rate 5e-4": Run(f"{SEARCH} --planner none --learning-rate 5e-4", MCTS),
            "4 simulations": Run(f"{SEARCH} --num-simulations 4", MCTS),
            "32 simulations": Run(f"{SEARCH} --num-simulations 32", MCTS),
        },
        [("bars", "steps_to_2.8"), ("bars", "fall"), ("curves", "return")],
    ),
    "parties": Section(
        "Why does a third hunter join the stag, and does a long run fall?",
        PARTY_RUNS,
        [
            ("bars", "fall"),
            ("bars", "party_3"),
            ("seats", "player"),
            ("curves", "party_2"),
            ("curves", "party_3"),
            ("curves", "party_4"),
        ],
    ),
    "parties-cpu": Section(
        "Does a third hunter join where that does not pay?",
        PARTY_RUNS_CPU,
        [("bars", "party_2"), ("bars", "party_3"), ("bars", "party_4")],
    ),
    "dose": Section(
        "How much imagination?",
        dose_runs(),
        [
            *(("return by dose", flag) for flag in DOSES),
            *(("steps by dose", flag) for flag in DOSES),
        ],
    ),
    "7": Section(
        "Which module pays, and where?",
        {
            **MEETING_RUNS,
            "HOP+ MCTS": Run(SEARCH, MCTS, then=(SEARCH_ADAPT,)),
            "HOP+, no imagination": Run(f"{ABLATED} --no-imagination", then=(ADAPT, f"{ADAPT} --sets strangers")),
            "HOP+, no memory": Run(f"{ABLATED} --memory-discount 0", then=(ADAPT,)),
            "HOP+, policy without subgoals": Run(f"{ABLATED} --subgoals none", then=(ADAPT,)),
            "PPO, few steps": Run(PPO_FEW),
            "PPO, few steps, 8x8": Run(PPO_FEW_8X8),
            "HOP+, few steps": Run(FEW),
            "few, discrete goals": Run(f"{FEW} --goal-kind discrete --goal-dim 8"),
            "few, 4 discrete goals": Run(f"{FEW} --goal-kind discrete --goal-dim 4"),
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
    "hop": Section(
        "HOP with our values and with its authors'; 8x8 with up to five wall pieces",
        hop_runs(),
        [
            ("bars", "return"),
            ("bars", "stag"),
            ("bars", "nothing"),
            ("bars", "steps_to_2.8"),
            ("bars", "fall"),
            ("curves", "return"),
        ],
    ),
    "hop-cpu": Section(
        "Which of its authors' values lowers HOP's return?",
        hop_runs_cpu(),
        [("bars", "return"), ("bars", "stag"), ("bars", "nothing"), ("curves", "return")],
    ),
    "time": Section(
        "Return after equal steps and after equal time",
        timed_runs(TIMINGS["time"]),
        TIMED_PANELS,
    ),
    "time-cpu": Section(
        "Return after equal steps and after equal time, on one CPU core",
        timed_runs(TIMINGS["time-cpu"]),
        TIMED_PANELS,
    ),
    "moa": Section(
        "How well does MOA predict each kind of co-player?",
        {
            "mixed": Run(ALONE, then=(EVALUATE,)),
            "mixed, no pretraining": Run(f"{ALONE} {UNPREPARED}", then=(EVALUATE,)),
            "self-play": PREPARATIONS["preparation (default)"],
            "self-play, no pretraining": PREPARATIONS["no preparation"],
        },
        [
            ("moa", "NLL"),
            ("moa actions", "recall"),
            ("moa confusion", "mixed"),
            ("moa", "top-1"),
            ("moa actions", "precision"),
            ("moa confusion", "mixed, no pretraining"),
        ],
    ),
    "pretraining": Section(
        "Does pretraining pay?",
        PREPARATIONS,
        [
            ("curves over all steps", "return"),
            ("curves over all seconds", "return"),
            ("curves over all steps", "moa_gap"),
            ("bars", "steps_to_2.8"),
            ("bars", "all_steps_to_2.8"),
            ("bars", "all_seconds_to_2.8"),
            ("bars", "return"),
            ("bars", "moa_gap"),
            ("bars", "after/probe"),
        ],
    ),
    "walls": Section(
        "Four players, 8x8, up to five wall pieces",
        {
            "PPO": Run(PPO_WALLS, then=(EVALUATE, ADAPT)),
            "PPO, learning rate 3e-4": Run(f"{PPO_WALLS} --learning-rate 3e-4", then=(EVALUATE, BEST_WALLS)),
            "HOP+": Run(f"{WALLS} --log-every 5 --total-timesteps 4000000", then=(*MODELS, ADAPT)),
            "HOP+ MCTS": Run(f"{WALLS} --log-every 2 --total-timesteps 240000", MCTS, then=(*MODELS, SEARCH_ADAPT)),
        },
        [
            ("bars", "return"),
            ("curves", "return"),
            ("bars", "steps_to_2.8"),
            ("bars", "after/exact/1"),
            ("bars", "after/exact/20"),
            ("bars", "after/probe"),
            ("moa", "NLL"),
            ("moa", "top-1"),
            ("adaptation", "standard"),
        ],
        references=("walls",),
    ),
    # Without runs of their own, from the tables of other sections: see SUMMARIES.
    "worst": Section("The worst case, from sections 7 and 8", {}, []),
}
