"""A trained learner meets the same co-players in game after game: frozen, or learning as it plays.

    python evaluation/adapt.py runs/RUN                                      # seven sets of rule-based players
    python evaluation/adapt.py runs/RUN --sets strangers                     # six of players that nobody trains with
    python evaluation/adapt.py runs/RUN --sets learned --others A=runs/RUN_A B=runs/RUN_B
    python evaluation/adapt.py runs/RUN --seats learner,random,random,nearest_stag --no-references
    python evaluation/adapt.py runs/ppo_gru__* --no-references      # the recurrent baseline: all its seeds

RUN, `--script` and what follows `--`: as in evaluate.py. Each set plays `--steps` steps, `--repetitions` times, the
learner in each seat in turn (one that was alone with rule-based players sits in all). It sits in `--games-at-once`
games, learns from the first alone, and remembers in each what it saw there: the others only make the scores less noisy.
Scores are mean returns of the games that ended in the last quarter of the steps. Their intervals are over training
seeds. References: a random player (normalised: 0), the scripted Bayes hunter of benchmarks/scripted.py, and a best
response (1): plain PPO trained with exactly this set. Beside the checkpoint: `adaptation_<set>.csv`, its
`_repetitions.csv` with every score, its `_curve.csv` and its `.png`.

How a learner learns, every `--every` steps: MOA from what was seen; it is used where it has predicted the newest steps
better so far than the MOA that the learner came with. A learner with a world model then imagines whole games with its
co-players as it remembers them and does PPO on these. One without does PPO on real steps. It acts with the new policy
only where that earns more than the one it came with, by two standard errors over the latest rounds: in imagined games,
or without a world model in held-out real games. These and the games that such a learner practises in are not counted as
steps, but as `test steps`. Nobody searches.
"""

import dataclasses
import functools
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from benchmarks.scripted import bayes_probs
from evaluation import frozen_players, gru, runs
from evaluation.runs import (
    DECAY,
    Run,
    RunFlags,
    Seated,
    check_returns,
    copy_params,
    interval,
    learner_index,
    mean_text,
    play,
    play_games,
    select_params,
    write_csv,
)
from stag_hunt_env import (
    Count,
    NonNegative,
    Positive,
    Seats,
    StagHuntEnv,
    Whole,
    command_line,
    sample,
    seats_table,
)

import matplotlib.style
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch.utils._pytree import tree_map
from tqdm import tqdm

SHORT = {
    "NS": "nearest_stag",
    "NH": "nearest_hare",
    "noisy NS": "noisy_stag",
    "noisy NH": "noisy_hare",
}
SETS = {
    "standard": ("3 NS", "3 NH", "3 random", "NS + 2 NH", "2 NS + NH", "2 NS + random", "NS + NH + random"),
    "strangers": ("3 noisy NS", "3 noisy NH", "3 switching", "3 waiting", "noisy NS + 2 noisy NH",
                  "switching + waiting + random"),
}  # fmt: skip
BEST_RESPONSE_GAMES = 512
FAR_ABOVE = 0.1  # of the highest payoff: by how much an imagined return may exceed the real one without a warning

ON_CPU = {  # where there is no GPU
    "repetitions": 4,
    "rounds": 4,
    "imagined_games": 64,
    "best_response_steps": 800_000,
}
LEARNING = (  # flags of the script, as they are here
    "learning_rate",
    "update_epochs",
    "num_minibatches",
    "ent_coef",
    "subgoal_learning_rate",
    "subgoal_updates",
)


@dataclasses.dataclass
class AdaptFlags:
    other_seeds: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATHS")]] = ()
    """of ppo_gru.py, where each seed has its own run folder: those of the other seeds"""
    sets: Literal["standard", "strangers", "learned"] = "standard"
    """sets of three co-players: known to everybody's models; not even to these; learners of
    --others, frozen"""
    others: tuple[str, ...] = ()
    """of --sets learned: run folders or checkpoints, each PATH or NAME=PATH"""
    seats: tuple[str, ...] = ()
    """own sets instead, such as learner,random,random,nearest_stag: one learner and named players in each"""
    modes: tuple[Literal["frozen", "learning"], ...] = ("frozen", "learning")
    """the learner as it is; learning, with the old weights unless the new ones are better"""
    steps: Count = 2400
    """env steps with the same co-players"""
    repetitions: Count = 20
    """repetitions per set, spread over the seats"""
    games_at_once: Count = 8
    """games that a learner plays side by side; it learns from the first, the score is of all"""
    every: Count = 100
    """env steps between two updates, a round"""
    rounds: Count = 8
    """batches of imagined games per update"""
    imagined_games: Annotated[int, (">= 2", 2, game.MOST)] = 128
    """imagined games at a time in each batch, and as often games by which the old and the new weights are compared"""
    references: bool = True
    """also measure a random player and the scripted Bayes hunter, and train a best response to each set"""
    best_response_steps: Count = 2_000_000
    """env steps of each best response"""
    learning_rate: Positive = 1e-3
    """policy: Adam's step size"""
    update_epochs: Count = 4
    """policy: passes over each batch"""
    num_minibatches: Count = 4
    """policy: minibatches per pass"""
    ent_coef: NonNegative = 0.01
    """policy: weight of the entropy"""
    subgoal_learning_rate: Positive = 1e-3
    """MOA: Adam's step size"""
    subgoal_updates: Whole = 4
    """MOA: updates per round (0: it does not learn)"""


@dataclasses.dataclass
class Args(RunFlags, AdaptFlags):
    path: str = tyro.MISSING
    other_seeds: tuple[str, ...] = ()
    run: Run | None = None
    other_runs: dict[str, Run] = dataclasses.field(default_factory=dict)  # main loads them


def parse_args(words: list[str]) -> Args:
    defaults = {} if torch.cuda.is_available() else ON_CPU
    groups = {"run": RunFlags, "adaptation": AdaptFlags}
    return runs.parse_args(words, Args, groups, load=load_run, **defaults)


def load_run(args: Args, words: list[str]) -> Run:
    if gru.is_gru(args.path):
        game.refuse(args.references, "--references are not for a run of ppo_gru.py: use --no-references")
        game.refuse(args.script is not None, f"--script {args.script} is not for a run of ppo_gru.py")
        run = gru.load_run([args.path, *args.other_seeds], args.device, words)
        gru.check_seeds(run)
        return run
    game.refuse(bool(args.other_seeds), f"PATHS: only runs of ppo_gru.py have several: {args.other_seeds}")
    return runs.load_run(args, words)


def co_player_sets(args: Args) -> dict[str, tuple[str, ...]]:
    """Name -> the co-players, in ego order from the learner's seat on"""
    players = args.run.args.config.num_players
    if not args.seats and players != 4:
        raise game.UserError(f"--sets {args.sets} has 3 co-players, this game has {players - 1}: use --seats")
    if args.sets == "learned":
        return frozen_players.sets_of(list(args.other_runs))
    sets = {}
    for seats in args.seats:
        names = game.seats_table(seats, players)
        named = names.count("learner") == 1 and "mixed" not in names
        game.refuse(not named, f"--seats needs one learner and named co-players, not {seats}")
        at = names.index("learner")
        others = (*names[at + 1 :], *names[:at])
        sets[" + ".join(others)] = others
    for name in () if sets else SETS[args.sets]:
        others = []
        for part in name.split(" + "):
            count, player = part.split(" ", 1) if part[0].isdigit() else ("1", part)
            others += [SHORT.get(player, player)] * int(count)
        sets[name] = tuple(others)
    return sets


def deal_seats(args: Args, sets: dict) -> tuple[list[list[str]], list[int]]:
    """Who sits where in each game, set by set, and which learner of the checkpoint: repetition r in seat r mod N"""
    run = args.run
    players = run.args.config.num_players
    trained = runs.learner_seats(seats_table(run.checkpoint["args"]["seats"], players))
    tables = []
    index = []
    for others, r in itertools.product(sets.values(), range(args.repetitions)):
        names = ("learner", *others)
        tables.append([names[(seat - r) % players] for seat in range(players)])
        seed = r // players % run.num_seeds
        index.append(learner_index(run.checkpoint, seed, trained[r % len(trained)]))
    return tables, index


def load_other_runs(args: Args) -> dict[str, Run]:
    """--others by name"""
    if args.sets != "learned":
        game.refuse(bool(args.others), "--others are the co-players of --sets learned")
        return {}
    game.refuse(bool(args.seats), "--sets learned and --seats: choose one of them")
    nobody = "--sets learned needs runs whose learners are the co-players: --others PATH ..."
    game.refuse(not args.others, nobody)
    return frozen_players.load_others(args.others, args.device, args.run.args.config)


def seat_learned(args: Args, seats: Seats, tables: list) -> Seats:
    """With the learned players of the tables; their seeds take turns by repetition"""
    numbers = []
    for block in range(len(tables)):
        numbers += [block % args.repetitions] * seats.num_envs
    return frozen_players.seat_others(args.other_runs, seats, tables, numbers)


def first_boards(run: Run, index: list[int], count: int = 1024):
    """Transitions [M, count, ...]: first boards of games that learner index[m] has in its replay"""
    replay = run.script.Transitions(**run.checkpoint["states"][0]["games"]["replay"]["data"])
    filled = replay.board.any(4)  # not so where nothing came in yet: all on cell 0
    begins = (replay.time == 0) & filled  # [rollouts, M, T, E]
    pools = []
    for m in range(begins.shape[1]):
        places = begins[:, m].nonzero()
        game.refuse(len(places) == 0, f"{run.path}: its replay holds no first board of a game to imagine from")
        spread = torch.arange(count) * max(1, len(places) // count) % len(places)
        rollout, step, column = places[spread].unbind(1)
        pools.append([x[rollout, m, step % x.shape[2], column] for x in replay])
    fields = [torch.stack(x)[index].to(run.device) for x in zip(*pools, strict=True)]
    return run.script.Transitions(*fields)


def capture_later(run: Run, state, function):
    """The same function; on a GPU a CUDA graph from its second call on"""

    def capture(function):
        return run.script.capture(function, state.games.env, state.args.cudagraphs)

    return runs.capture_later(function, capture)


def pooled_horizon(run: Run, state, transitions) -> torch.Tensor:
    """For how many steps boards and payoffs are right, int64 [M]: of all learners together, who have one game each"""
    args = state.args
    if args.trust_exact_match == 0:
        return torch.full_like(state.horizon, args.imagination_horizon)
    horizon, metrics = run.script.measure_horizon(args, state.networks, transitions)
    steps = min(args.imagination_horizon, transitions.done.shape[1])
    present = run.script.learner_mask(args.config, transitions.board[:, :steps, 0])  # [M, steps]
    going = torch.cat([torch.ones_like(present[:, :1]), ~transitions.done[:, : steps - 1, 0]], 1)
    seen = (present & going).int().cumprod(1)
    right = [metrics[f"wm/exact_match/{k + 1}"] * metrics[f"wm/payoff_match/{k + 1}"] for k in range(steps)]
    trusted = (torch.stack(right, 1) * seen).sum(0) >= args.trust_exact_match * seen.sum(0)
    return trusted.int().cumprod(0).sum().expand_as(horizon)


def other_games(args: Args, run: Run, state, tables: list, number: int, num_envs: int) -> Seated:
    """The same learners, with the same co-players, in other games"""
    flags = dataclasses.replace(state.args, num_envs=num_envs, num_steps=1)
    run.script.seed_everything([args.seed + number], rank=0, stream=0)
    seated = frozen_players.stand_ins(args.other_runs, tables)
    games = run.script.Games(flags, seated, run.device)
    games.seats = seat_learned(args, games.seats, tables)
    return Seated(flags, games, state.networks)


def adaptation_loop(args: Args, run: Run, state, tables: list, boards, mode: str):
    """A generator, one round at a time. tables: who sits where. boards (see first_boards): to
    imagine games from, or None -> return and number of the learner's games that ended [M, 2];
    metrics [M]"""
    learn = mode == "learning"
    script = run.script
    flags = state.args
    env = state.games.env
    replay = state.games.replay
    networks = state.networks
    policy = networks.policy
    seat = state.games.seats.learner_seat[:, 0]
    rows = torch.arange(len(seat), device=run.device)
    came_with = learned = copy_params(policy)
    gain = variance = torch.zeros(len(seat), device=run.device)  # of the new policy over the one it came with
    test_steps = torch.zeros(len(seat), dtype=torch.float64, device=run.device)
    metrics = {"test steps": test_steps}
    learn_moa = learn and networks.moa is not None and flags.subgoal_updates > 0
    if learn_moa:
        for p in networks.inference.parameters():  # q_phi stays: it wrote what is remembered
            p.requires_grad_(False)
        optimizer = script.Adam(networks.moa.parameters(), flags.subgoal_learning_rate)
        moa_before = moa_learned = copy_params(networks.moa)
        evidence = torch.zeros(len(seat), device=run.device)

    def moa_nll(params, transitions):
        """Mean -log p of the co-players' newest actions [M], with the same noise for all params"""
        networks.moa.load_state_dict(params)
        with torch.no_grad(), torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
            torch.manual_seed(args.seed)
            return script.opponent_model_losses(flags, env, networks, transitions, 0.0)["moa"]

    def remembered_history():
        history = state.games.history[:, :1]
        return script.history_after_game(flags, history, script.history_decay(flags))

    def imagine_games():
        history = remembered_history()
        starts = boards._replace(history=history.expand(-1, boards.time.shape[1], *history.shape[2:]))
        return script.imagine(flags, env, networks, starts, args.imagined_games, state.horizon)

    def imagined_return():
        """Mean and its squared standard error [M]. A row holds one game after another; what follows
        the last that ended is left out"""
        samples = imagine_games()
        ended = (samples["ended"] & samples["mask"]).float()  # [M, h, n]
        in_whole_games = ended.flip(1).cumsum(1).flip(1) > 0
        total = (samples["reward"] * samples["mask"] * in_whole_games).sum(1)  # [M, n]
        games = ended.sum(1)
        count = games.sum(1).clamp(min=1)
        mean = total.sum(1) / count
        error = (total - mean[:, None] * games).square().sum(1) / count.square()
        decided = samples["log_prob"].isfinite().flatten(1).all(1)
        return torch.where(decided, mean, math.nan), error

    def held_out_return():
        """The same, of real games"""
        held_out.games.history.copy_(remembered_history())
        # What is under way began with other weights.
        played = play_games(run, held_out, 1, skip=1, play_on=play_held_out)
        steps = played["steps"][..., 0].sum(1)  # of all places of a repetition
        test_steps.add_(torch.tensor(steps, device=run.device))
        returns = torch.tensor(played["return"], dtype=torch.float32, device=run.device)
        total = returns[rows, :, seat]
        return total.mean(1), total.var(1) / total.shape[1]

    def learn_policy(samples, real):
        batch = script.make_ppo_batch(flags, samples, real=real)
        script.ppo_update(flags, policy, state.optimizers["policy"], batch)

    play_round = capture_later(run, state, functools.partial(play, run, state, args.every))
    learn_imagined = capture_later(run, state, lambda: learn_policy(imagine_games(), False))
    judge = held_out_return
    judged = "held-out return"
    if boards is not None:
        judge = capture_later(run, state, imagined_return)
        judged = "imagined return"
    elif learn:
        held_out = other_games(args, run, state, tables, 1, args.imagined_games)
        play_held_out = capture_later(run, held_out, functools.partial(play, run, held_out, 8))
        practice = other_games(args, run, state, tables, 2, 1)
        practise_round = capture_later(run, practice, functools.partial(play, run, practice, args.every))
    for _ in range(args.steps // args.every):
        transitions, outputs, episodes = play_round()
        runs.check_decisions(run.path, outputs["log_probs"])
        done = episodes["done"].unflatten(1, (len(seat), -1)).movedim(1, 0)  # [M, T, E]
        returns = episodes["return"].unflatten(1, (len(seat), -1))[:, rows, :, seat]
        returns = done * returns
        earned = torch.stack([returns.sum((1, 2)), done.sum((1, 2))], 1)
        transitions = tree_map(lambda x: x[:, :, :1], transitions)
        if learn_moa:
            evidence += moa_nll(moa_before, transitions) - moa_nll(moa_learned, transitions)
            replay.push(transitions)
            script.train_opponent_models(flags, env, networks, optimizer, replay, None, 0.0, args.subgoal_updates)
            moa_learned = copy_params(networks.moa)
            networks.moa.load_state_dict(select_params(evidence > 0, moa_learned, moa_before))
        if learn:
            policy.load_state_dict(learned)
        if learn and boards is None:  # PPO learns from what the new weights do, whoever acts
            transitions, outputs, _ = practise_round()
            test_steps.add_(transitions.done[0].numel())  # one game of each repetition
            learn_policy(script.real_samples(flags, env.config, transitions, outputs), True)
        elif learn:
            state.horizon.copy_(pooled_horizon(run, state, transitions))
            for _ in range(args.rounds):
                learn_imagined()
        learned = copy_params(policy)
        if learn:
            new, new_error = (x.clone() for x in judge())
            policy.load_state_dict(came_with)
            old, old_error = judge()
            check_returns(run, judged, new, new_error, old, old_error)
            gain = DECAY * gain + new - old
            variance = DECAY**2 * variance + new_error + old_error
            better = gain > 2 * variance.sqrt()
            policy.load_state_dict(select_params(better, learned, came_with))
            metrics[judged] = torch.where(better, new, old)
            metrics["policy changed"] = better
        yield earned.cpu().numpy(), metrics


def bayes_hunter(args: Args, run: Run, tables: list):
    """As adaptation_loop: the scripted hunter, which neither learns nor remembers a game"""
    env = StagHuntEnv(run.args.config, len(tables) * args.games_at_once, run.device, args.seed)
    seated = frozen_players.stand_ins(args.other_runs, tables)
    seats = Seats(env, seated, population=run.args.population)
    seats = seat_learned(args, seats, tables)
    seat = seats.learner_seat.flatten()
    rows = torch.arange(env.num_envs, device=run.device)

    def by_table(steps):  # T of [B] -> [M, T, E]
        return torch.stack(steps).unflatten(1, (len(tables), -1)).movedim(1, 0).cpu().numpy()

    for _ in range(args.steps // args.every):
        ended = []
        returns = []
        for _ in range(args.every):
            actions = sample(seats.action_probs(env.state, bayes_probs(env, seats)))
            _, present_before, done = env.advance(actions)
            seats.update(actions, present_before, done)
            ended.append(done)
            returns.append(done * env.final_return[rows, seat])
        done = by_table(ended)
        returns = by_table(returns)
        earned = np.stack([returns.sum((1, 2)), done.sum((1, 2))], 1)
        yield earned, {}


def best_responses(args: Args, run: Run, sets: dict, num_iterations: int):
    """A generator: trains plain PPO with exactly each set, an iteration at a time. At last yields its mean return in
    each place of new games [sets, E]"""
    ppo_args = run.script.make_args(
        "ppo",
        args.device,
        config=run.args.config,
        seed=args.seed,
        precision=run.args.precision,
        num_envs=BEST_RESPONSE_GAMES,
        learning_rate=1e-3,
    )
    tables = [["learner", *players] for players in sets.values()]
    seated = frozen_players.stand_ins(args.other_runs, tables)
    state = run.script.make_train_state(ppo_args, seated, [args.seed], run.device)
    seats = state.games.seats
    numbers = list(range(seats.num_envs)) * len(tables)  # in each block all seeds of a run
    state.games.seats = frozen_players.seat_others(args.other_runs, seats, tables, numbers)
    iteration = capture_later(run, state, functools.partial(run.script.train_iteration, state))
    for number in range(num_iterations):
        rate = ppo_args.learning_rate * (1 - 0.9 * number / num_iterations)
        state.optimizers["policy"].param_groups[0]["lr"].fill_(rate)
        iteration()
        yield None
    yield play_games(run, state, 4, skip=1)["return"][..., 0] / 4  # seat 0: the learner


def timed(function, times: int) -> float:
    """Seconds of the last of `times` calls: on a GPU the first ones warm up and capture"""
    for _ in range(times):
        began = time.perf_counter()
        function()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return time.perf_counter() - began


def make_loops(args: Args, run: Run, sets: dict, modes: tuple[str, ...]) -> dict:
    """mode -> its generator"""
    tables, index = deal_seats(args, sets)
    loops = {}
    for mode in modes:
        if mode == "Bayes hunter":
            loops[mode] = bayes_hunter(args, run, tables)
            continue
        if run.script is gru.ppo_gru:
            seated = frozen_players.stand_ins(args.other_runs, tables)
            seat_others = functools.partial(seat_learned, args, tables=tables)
            loops[mode] = gru.gru_loop(args, run, seated, index, mode, seat_others)
            continue
        imagination = mode == "learning" and "world" in run.networks
        state = make_state(args, run, tables, index, imagination)
        if mode == "random":  # all logits 0
            policy = state.networks.policy
            policy.load_state_dict({name: 0 * p for name, p in policy.state_dict().items()})
        boards = first_boards(run, index) if imagination else None
        loops[mode] = adaptation_loop(args, run, state, tables, boards, mode)
    return loops


def make_state(args: Args, run: Run, tables: list, index: list[int], imagination: bool):
    """A TrainState in which the checkpoint's learners `index` [M] sit in the learner seats of `tables`"""
    changes = {name: getattr(args, name) for name in LEARNING}
    if hasattr(run.args, "planner"):
        changes["planner"] = "none"
    flags = dataclasses.replace(
        run.args,
        **runs.FROZEN,
        **changes,
        imagination=imagination,
        num_envs=args.games_at_once,
        num_steps=args.every,
        replay_rollouts=args.steps // args.every,
        imagination_horizon=run.args.config.final_time,
        critic_data="mixed",
        subgoal_batch_size=2,
        share_parameters=False,
    )
    seated = frozen_players.stand_ins(args.other_runs, tables)
    state = run.script.make_train_state(flags, seated, [args.seed], run.device)
    runs.load_agents(run, state.networks, index)
    state.games.seats = seat_learned(args, state.games.seats, tables)
    return state


def cluster_means(values: np.ndarray, clusters: np.ndarray) -> list[float]:
    """values [repetitions] -> the mean of each cluster"""
    return [float(values[clusters == cluster].mean()) for cluster in np.unique(clusters)]


def check_flags(args: Args) -> None:
    """Refuses what could not be played or written"""
    final_time = args.run.args.config.final_time
    quarter = args.steps // args.every // 4
    whole = args.steps % args.every == 0 and quarter * args.every >= final_time
    game.refuse(not args.modes, "--modes names none")
    game.refuse(not whole, f"--steps must be a multiple of --every, and a quarter of it a game of {final_time} steps")
    start = results_path(args)
    runs.check_writable(*(f"{start}{end}" for end in (".csv", "_repetitions.csv", "_curve.csv", ".png")))


def main(args: Args) -> dict[str, float]:
    """-> score by mode and set"""
    run = args.run
    args.other_runs = load_other_runs(args)
    sets = co_player_sets(args)
    check_flags(args)
    rounds = args.steps // args.every
    modes = args.modes
    iterations = 0
    if args.references:
        modes = ("random", "Bayes hunter", *modes)
        per_iteration = BEST_RESPONSE_GAMES * run.script.make_args("ppo", args.device).num_steps
        iterations = math.ceil(args.best_response_steps / per_iteration)
    print(f"{len(sets)} set(s) of co-players x {args.repetitions} repetitions x {args.steps} steps, {rounds} rounds")
    print(f"modes: {', '.join(modes)}; best responses: {iterations} iterations of PPO", flush=True)
    curves = {mode: [] for mode in modes}
    imagined = {}
    metrics = {}
    loops = make_loops(args, run, sets, modes)

    def play_all():
        for mode, loop in loops.items():
            earned, metrics[mode] = next(loop)
            curves[mode].append(earned)
            if "imagined return" in metrics[mode]:
                imagined.setdefault(mode, []).append(metrics[mode]["imagined return"].cpu().numpy())

    warm_up = 3 if run.device.type == "cuda" else 1
    training = best_responses(args, run, sets, iterations)
    seconds = timed(play_all, warm_up) * (rounds - warm_up)
    if iterations > warm_up:
        seconds += timed(lambda: next(training), warm_up) * (iterations - warm_up)
    print(f"about {seconds / 60:.1f} minutes to go on {run.device}", flush=True)
    for _ in tqdm(range(rounds - warm_up), desc="adaptation", unit="round", leave=False):
        play_all()
    curves = {name: np.reshape(curve, (rounds, len(sets), -1, 2)) for name, curve in curves.items()}
    best = None
    if args.references:
        *_, best = tqdm(training, total=iterations, desc="best responses", unit="iteration", leave=False)
    return summarise(args, sets, curves, imagined, metrics, best)


def summarise(args: Args, sets, curves, imagined, metrics, best) -> dict[str, float]:
    """Prints and writes the scores. curves {name: [rounds, sets, repetitions, 2]}, imagined {mode:
    returns [sets * repetitions] of each round}, best: what best_responses yields at last, or None
    -> score by mode and set"""
    run = args.run
    config = run.args.config
    quarter = args.steps // args.every // 4
    scores = {}
    for name, curve in curves.items():
        last = curve[-quarter:].sum(0)  # [sets, repetitions, 2]
        scores[name] = last[..., 0] / last[..., 1]
    # The last quarter was played with the weights of one round earlier.
    imagined = {mode: np.mean(x[-quarter - 1 : -1], 0).reshape(len(sets), -1) for mode, x in imagined.items()}
    repetition = np.arange(args.repetitions)
    seed = repetition // config.num_players % run.num_seeds
    table = {}
    more = {}
    for name, score in scores.items():
        clusters = seed if name in args.modes else repetition  # nobody trained the others
        table[name] = [interval(cluster_means(row, clusters)) for row in score]
    if best is not None:
        table["best response"] = [interval(row) for row in best]
    for mode, returns in imagined.items():
        mean = np.array([np.mean(cluster_means(row, seed)) for row in returns])
        real = np.array([mean for mean, _ in table[mode]])
        too_high = mean - real > FAR_ABOVE * max(config.payoffs())
        more[f"{mode} imagined mean"] = mean
        more[f"{mode} warning"] = too_high.astype(int)
        changed = metrics[mode]["policy changed"].float().reshape(len(sets), -1).mean(1)
        for k in np.flatnonzero(too_high):
            texts = f"imagined return {mean[k]:.2f}, real {real[k]:.2f}"
            print(f"warning: {mode}, {list(sets)[k]}: {texts}, new weights in {changed[k]:.0%} of the repetitions")
    test_steps = {}
    for name in args.modes:
        test_steps[name] = metrics[name]["test steps"].reshape(len(sets), -1).cpu().numpy()
        more[f"{name} test steps"] = test_steps[name].mean(1)
    shape = (len(sets), args.repetitions)
    by_repetition = {
        "seed": np.broadcast_to(run.checkpoint["args"]["seed"] + seed, shape),
        "seat": np.broadcast_to(repetition % config.num_players, shape),
        **scores,
        **{f"{mode} test steps": x for mode, x in test_steps.items()},
        **{f"{mode} imagined": x for mode, x in imagined.items()},
    }
    write_results(args, list(sets), table, more, by_repetition, curves)
    for name in args.modes:
        if name != "frozen" and "frozen" in scores:
            gains = []
            for key, row in zip(sets, scores[name] - scores["frozen"], strict=True):
                gains.append(f"{key} {mean_text(*interval(cluster_means(row, seed)))}")
            print(f"{name} minus frozen: " + ", ".join(gains))
    counted = ", ".join(f"{name} {steps.mean():.0f}" for name, steps in test_steps.items())
    print(f"test steps of each repetition, real ones beside the {args.steps} that count: {counted}")
    return {f"{name}/{key}": row[k][0] for name, row in table.items() for k, key in enumerate(sets)}


def results_path(args: Args) -> Path:
    title = "_".join(seats.replace(",", "-") for seats in args.seats)[:200] or args.sets
    return args.run.path.parent / f"adaptation_{title}"


def write_results(args: Args, sets: list[str], table: dict, more: dict, by_repetition: dict, curves: dict) -> None:
    """table {name: (mean, half width) per set}, more {column: value per set}, by_repetition {column: [sets,
    repetitions]}, curves {name: [rounds, sets, repetitions, 2]}"""
    start = results_path(args)
    normalised = [name for name in table if name not in ("random", "best response")]
    columns = [f"{name} {part}" for name in table for part in ("mean", "half_width_95")]
    columns += [f"{name} normalised" for name in normalised]
    rows = [["co_players", *columns, *more]]
    has_references = "best response" in table
    scale = " (normalised: random 0, best response 1)" if has_references else ""
    print(f"return over the last quarter of {args.steps} steps{scale}")
    print(" " * 42 + "".join(name.rjust(22) for name in table))
    for k, key in enumerate(sets):
        low, high = (table[name][k][0] if name in table else math.nan for name in ("random", "best response"))
        means = []
        norms = []
        line = key.ljust(42)
        for name, by_set in table.items():
            mean, half = by_set[k]
            means += [mean, half]
            text = mean_text(mean, half)
            if name in normalised:
                norm = (mean - low) / (high - low) if high != low else math.nan
                norms.append(norm)
                text += f" ({norm:.2f})" if has_references else ""
            line += text.rjust(22)
        rows.append([key, *means, *norms, *(column[k] for column in more.values())])
        print(line)
    repetitions = [["co_players", "repetition", *by_repetition]]
    for (k, key), r in itertools.product(enumerate(sets), range(args.repetitions)):
        repetitions.append([key, r, *(f"{column[k, r]:.6g}" for column in by_repetition.values())])
    matplotlib.style.use(runs.ROOT / "benchmarks" / "plots.mplstyle")
    figure = Figure((max(4, 2.6 * len(sets)), 2.8), layout="tight")
    axes = figure.subplots(1, len(sets), squeeze=False)
    points = [["co_players", "learner", "steps", "return"]]
    for k, (key, axis) in enumerate(zip(sets, axes[0], strict=True)):
        for name, curve in curves.items():
            total, games = np.moveaxis(curve[:, k].sum(1), 1, 0)  # [rounds]
            steps = (np.arange(len(total)) + 1) * args.every
            mean = total / np.maximum(games, 1)
            axis.plot(steps, mean, label=name)
            points += [[key, name, *pair] for pair in zip(steps, mean, strict=True)]
        axis.set(title=key, xlabel="steps")
    axes[0][0].legend()
    figure.savefig(f"{start}.png")
    write_csv(f"{start}.csv", rows)
    write_csv(f"{start}_repetitions.csv", repetitions)
    write_csv(f"{start}_curve.csv", points)
    print(f"wrote {start}.csv, _repetitions.csv, _curve.csv and .png")


if __name__ == "__main__":
    command_line(parse_args, main)
