"""A trained learner meets the same co-players in game after game: frozen, learning as it plays, or searching.

    python evaluation/adapt.py runs/RUN                                      # seven sets of rule-based players
    python evaluation/adapt.py runs/RUN --sets strangers                     # six of players that nobody trains with
    python evaluation/adapt.py runs/RUN --seats learner,random,random,nearest_stag --no-references
    python evaluation/adapt.py runs/RUN --script hopplus_mcts.py --modes frozen search -- --planner mcts

RUN, `--script` and what follows `--`: as in evaluate.py. Each set plays `--steps` steps, `--repetitions` times, the
learner in each seat in turn. Scores are mean returns of the games that ended in the last quarter of the
steps, beside a random player's (normalised: 0) and those of a best response (1), plain PPO trained with exactly this
set. Beside the checkpoint: `adaptation_<set>.csv`, its `_curve.csv` and its `.png`.

How a learner learns, every `--every` steps: MOA from what was seen; it is used where it has predicted the newest steps
better so far than the MOA that the learner came with. A learner with a world model then imagines whole games with its
co-players as it remembers them, does PPO on these, and acts with the new policy where that earns more in imagination
than the one it came with, by two standard errors. One without does PPO on the real steps.
"""

import dataclasses
import functools
import itertools
import math
import time
from typing import Literal

import evaluate
import numpy as np
import torch
import tyro
from evaluate import Run, RunFlags, interval, learner_index, make_state, mean_text, play, play_games, write_csv
from matplotlib.figure import Figure
from tqdm import tqdm

from stag_hunt_env import Count, NonNegative, Positive, Whole, command_line, seats_table

SHORT = {"NS": "nearest_stag", "NH": "nearest_hare", "noisy NS": "noisy_stag", "noisy NH": "noisy_hare"}
SETS = {
    "standard": ("3 NS", "3 NH", "3 random", "NS + 2 NH", "2 NS + NH", "2 NS + random", "NS + NH + random"),
    "strangers": ("3 noisy NS", "3 noisy NH", "3 switching", "3 waiting", "noisy NS + 2 noisy NH",
                  "switching + waiting + random"),
}  # fmt: skip
SHOWN = ("moa/nll", "moa/top1", "moa/ceiling/nll", "moa/ceiling/top1", "MOA changed", "imagined return",
         "imagined return before", "policy changed")  # fmt: skip

LEARNING = "learning_rate", "update_epochs", "num_minibatches", "ent_coef", "subgoal_learning_rate", "subgoal_updates"


@dataclasses.dataclass
class AdaptFlags:
    sets: Literal["standard", "strangers"] = "standard"
    """sets of three co-players: known to everybody's models, or not even to these"""
    seats: tuple[str, ...] = ()
    """own sets instead, such as learner,random,random,nearest_stag: one learner and named players in each"""
    modes: tuple[Literal["frozen", "search", "learning", "both"], ...] = ("frozen", "learning")
    """the learner as it is; searching (a script with a planner); learning; searching and learning"""
    steps: Count = 2400
    """env steps with the same co-players"""
    repetitions: Count = 64
    """repetitions per set, spread over the seats"""
    every: Count = 100
    """env steps between two updates, a round"""
    rounds: Count = 4
    """batches of imagined games per update"""
    imagined_games: Count = 128
    """imagined games in each batch"""
    references: bool = True
    """also measure a random player and train a best response to each set"""
    best_response_steps: Count = 2_000_000
    """env steps of each best response"""
    learning_rate: Positive = 1e-3
    """policy: Adam's step size"""
    update_epochs: Count = 4
    """policy: passes over each batch"""
    num_minibatches: Count = 4
    """policy: minibatches per pass"""
    ent_coef: NonNegative = 0.03
    """policy: weight of the entropy"""
    subgoal_learning_rate: Positive = 1e-3
    """MOA: Adam's step size"""
    subgoal_updates: Whole = 4
    """MOA: updates per round (0: it does not learn)"""


@dataclasses.dataclass
class Args(RunFlags, AdaptFlags):
    path: str = tyro.MISSING
    run: Run | None = None


def parse_args(words: list[str]) -> Args:
    contract = evaluate.CONTRACT + evaluate.FOR_ADAPT
    return evaluate.parse_args(words, Args, {"run": RunFlags, "adaptation": AdaptFlags}, contract)


def co_player_sets(args: Args) -> dict[str, tuple[str, ...]]:
    """Name -> the co-players, in ego order from the learner's seat on"""
    n, sets = args.run.args.config.num_players, {}
    if not args.seats and n != 4:
        raise ValueError(f"--sets {args.sets} has 3 co-players, this game has {n - 1}: use --seats")
    for seats in args.seats:
        names = seats_table(seats, n)
        if names.count("learner") != 1 or "mixed" in names:
            raise ValueError(f"--seats needs one learner and named co-players, not {seats}")
        at = names.index("learner")
        others = (*names[at + 1 :], *names[:at])
        sets[" + ".join(others)] = others
    for name in () if sets else SETS[args.sets]:
        parts = [part.split(" ", 1) if part[0].isdigit() else ("1", part) for part in name.split(" + ")]
        sets[name] = tuple(SHORT.get(player, player) for count, player in parts for _ in range(int(count)))
    return sets


def deal_seats(args: Args, sets: dict) -> tuple[list[list[str]], list[int]]:
    """Who sits where in each game, set by set, and which learner of the checkpoint: repetition r in seat r mod N"""
    saved, n = args.run.checkpoint["args"], args.run.args.config.num_players
    trained = [i for i, name in enumerate(seats_table(saved["seats"], n)) if name == "learner"]
    tables, index = [], []
    for players, r in itertools.product(sets.values(), range(args.repetitions)):
        tables.append([("learner", *players)[(i - r) % n] for i in range(n)])
        index.append(learner_index(args.run.checkpoint, r // n % saved["num_seeds"], trained[r % len(trained)]))
    return tables, index


def first_boards(run: Run, index: list[int], count: int = 256):
    """Transitions [M, count, ...]: first boards of games that learner index[m] has in its replay"""
    kept = run.script.Replay(run.args.replay_rollouts, len(index), "cpu")
    kept.load_state_dict(run.checkpoint["states"][0]["replay"])
    replay, pools = kept.data, []
    for m in range(replay.time.shape[1]):
        found = ((replay.time[:, m] == 0) & (replay.board[:, m].flatten(3).amax(3) > 0)).nonzero()
        if len(found) == 0:
            raise ValueError("the checkpoint's replay holds no first board of a game to imagine from")
        r, t, e = found[torch.arange(count) * max(1, len(found) // count) % len(found)].unbind(1)
        pools.append([x[r, m, t % x.shape[2], e] for x in replay])
    return run.script.Transitions(*(torch.stack(x)[index].to(run.device) for x in zip(*pools, strict=True)))


def copy_params(network) -> dict:
    return {name: p.clone() for name, p in network.state_dict().items()}


def select_params(which: torch.Tensor, new: dict, old: dict) -> dict[str, torch.Tensor]:
    """Params of M stacked networks: the new where which bool [M], else the old"""
    return {name: torch.where(which.view(-1, *[1] * (p.dim() - 1)), p, old[name]) for name, p in new.items()}


def capture_later(run: Run, state, function):
    """The same function; on a GPU a CUDA graph from its second call on"""

    def versions():
        yield function
        captured = run.script.capture(function, state.env, state.args.cudagraphs)
        while True:
            yield captured

    version = versions()
    return lambda: next(version)()


def pooled_horizon(run: Run, state, transitions) -> torch.Tensor:
    """For how many steps boards and payoffs are right, int64 [M]: of all learners together, who have one game each"""
    args, config = state.args, state.env.config
    if args.trust_exact_match == 0:
        return torch.full_like(state.horizon, args.imagination_horizon)
    horizon, metrics = run.script.measure_horizon(args, config, state.networks, transitions)
    steps = min(args.imagination_horizon, transitions.done.shape[1])
    present = (transitions.board[:, :steps, 0, 0].flatten(2).amax(2) > 0) | config.prosocial  # [M, steps]
    going = torch.cat([torch.ones_like(present[:, :1]), ~transitions.done[:, : steps - 1, 0]], 1)
    seen = (present & going).int().cumprod(1)
    right = [metrics[f"wm/exact_match/{k + 1}"] * metrics[f"wm/payoff_match/{k + 1}"] for k in range(steps)]
    trusted = (torch.stack(right, 1) * seen).sum(0) >= args.trust_exact_match * seen.sum(0)
    return trusted.int().cumprod(0).sum().expand_as(horizon)


def adaptation_loop(args: Args, run: Run, state, boards, learn: bool):
    """A generator, one round at a time. -> return and number of the learner's games that ended [M, 2], and metrics [M].
    boards (see first_boards): to imagine games from, or None"""
    script, env, networks, policy = run.script, state.env, state.networks, state.networks.policy
    seat, flags = state.seats.learner_seat[:, 0], state.args
    rows, rounds = torch.arange(len(seat), device=run.device), args.steps // args.every
    came_with = learned = copy_params(policy)
    metrics, learn_moa = {}, learn and networks.moa is not None and flags.subgoal_updates > 0
    if learn_moa:
        for p in networks.inference.parameters():  # q_phi stays: it wrote what is remembered
            p.requires_grad_(False)
        optimizer = script.make_optimizer(networks.moa.parameters(), flags.subgoal_learning_rate)
        moa_before = moa_learned = copy_params(networks.moa)
        evidence = torch.zeros(len(seat), device=run.device)
    oracle_id = None if boards is None else torch.zeros_like(boards.oracle_id[:, :1])

    def moa_nll(params, transitions):
        """Mean -log p of the co-players' newest actions [M], with the same noise for all params"""
        networks.moa.load_state_dict(params)
        with torch.no_grad(), torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
            torch.manual_seed(args.seed)
            return script.opponent_model_losses(flags, env, networks, transitions, 0.0)["moa"]

    def imagine_games():
        pick = torch.randint(boards.time.shape[1], (len(seat), args.imagined_games), device=run.device)
        start = script.Transitions(*(x[rows[:, None], pick] for x in boards))
        history = state.rollout_state["history"]
        over = torch.ones_like(history[..., :1], dtype=torch.bool)
        history = script.add_event(history, 0.0, over, script.history_decay(flags))
        remembered = {"history": history, "oracle_id": oracle_id}
        remembered = {name: x.expand(-1, args.imagined_games, *x.shape[2:]) for name, x in remembered.items()}
        start = start._replace(**remembered)
        return script.imagine(flags, env, networks, start, torch.ones_like(start.done), state.horizon)

    def imagined_return():
        """Mean and its squared standard error [M]"""
        samples = imagine_games()
        total = (samples["reward"] * samples["mask"]).sum(1)
        return total.mean(1), total.var(1) / total.shape[1]

    def learn_policy(samples, real):
        batch = script.make_ppo_batch(flags, samples, real=real)
        script.ppo_update(flags, policy, state.optimizers["policy"], batch)

    play_round = capture_later(run, state, functools.partial(play, run, state, args.every))
    learn_imagined = capture_later(run, state, lambda: learn_policy(imagine_games(), False))
    judge = capture_later(run, state, imagined_return)
    for number in range(rounds):
        transitions, outputs, episodes = play_round()
        done = episodes["done"].float()  # [T, M]
        earned = torch.stack([(done * episodes["return"][:, rows, seat]).sum(0), done.sum(0)], 1)
        if networks.moa is not None and number == rounds - 1:
            metrics |= script.moa_metrics(flags, env, state.seats, networks, transitions, episodes)
        if learn_moa:
            evidence += moa_nll(moa_before, transitions) - moa_nll(moa_learned, transitions)
            state.replay.push(transitions)
            script.train_opponent_models(flags, env, networks, optimizer, state.replay, None, 0.0, args.subgoal_updates)
            moa_learned = copy_params(networks.moa)
            networks.moa.load_state_dict(select_params(evidence > 0, moa_learned, moa_before))
            metrics["MOA changed"] = evidence > 0
        if learn:
            policy.load_state_dict(learned)
        if learn and boards is None:
            learn_policy(script.real_samples(flags, env.config, transitions, outputs), True)
            learned = copy_params(policy)
        elif learn:
            oracle_id.copy_(transitions.oracle_id[:, -1])
            state.horizon.copy_(pooled_horizon(run, state, transitions))
            for _ in range(args.rounds):
                learn_imagined()
            learned = copy_params(policy)
            new, new_error = (x.clone() for x in judge())
            policy.load_state_dict(came_with)
            old, old_error = judge()
            better = new - old > 2 * (new_error + old_error).sqrt()
            policy.load_state_dict(select_params(better, learned, came_with))
            metrics |= {"imagined return": torch.where(better, new, old), "imagined return before": old.clone()}
            metrics["policy changed"] = better
        yield earned.cpu().numpy(), metrics


def best_responses(args: Args, run: Run, sets: dict, num_iterations: int, games: int):
    """A generator: trains plain PPO with exactly each set, an iteration at a time; at last yields what it earns"""
    changes = {"config": run.args.config, "seed": args.seed, "num_envs": games, "precision": run.args.precision}
    ppo_args = run.script.make_args("ppo", args.device, **changes)
    tables = [["learner", *players] for players in sets.values()]
    state = run.script.make_train_state(ppo_args, tables, [args.seed], run.device)
    iteration = capture_later(run, state, functools.partial(run.script.train_iteration, state, False, False))
    for number in range(num_iterations):
        rate = ppo_args.learning_rate * (1 - 0.9 * number / num_iterations)
        state.optimizers["policy"].param_groups[0]["lr"].fill_(rate)
        iteration()
        yield None
    sums = play_games(run, state, 4)
    yield (sums["return"][:, 0] / sums["games"][:, 0]).tolist()


def timed(function, times: int) -> float:
    """Seconds of the last of `times` calls: on a GPU the first ones warm up and capture"""
    for _ in range(times):
        began = time.perf_counter()
        function()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return time.perf_counter() - began


def main(args: Args) -> dict[str, float]:
    """-> score by mode and set"""
    run, sets, rounds = args.run, co_player_sets(args), args.steps // args.every
    final_time, searching = run.args.config.final_time, {"search", "both"} & set(args.modes)
    if args.steps % args.every or rounds // 4 * args.every < final_time:
        raise ValueError(f"--steps must be a multiple of --every, and a quarter of it a game of {final_time} steps")
    if searching and getattr(run.args, "planner", "none") == "none":
        raise ValueError(f"--modes {searching.pop()}: nobody searches without a script's -- --planner mcts")
    tables, index = deal_seats(args, sets)
    modes = ("random", *args.modes) if args.references else args.modes
    per_iteration = 512 * run.script.make_args("ppo", args.device).num_steps
    iterations = math.ceil(args.best_response_steps / per_iteration) if args.references else 0
    print(f"{len(sets)} set(s) of co-players x {args.repetitions} repetitions x {args.steps} steps, {rounds} rounds")
    print(f"modes: {', '.join(modes)}; best responses: {iterations} iterations of PPO", flush=True)
    changes = {name: getattr(args, name) for name in LEARNING} | {"offline_ratio": 0.0}
    changes |= {"num_envs": 1, "num_steps": args.every, "replay_rollouts": rounds, "share_parameters": False}
    changes |= {"imagination_horizon": final_time, "critic_data": "mixed", "subgoal_batch_size": 2}
    curves, metrics, loops = {mode: [] for mode in modes}, {}, {}
    for mode in modes:
        learn = mode in ("learning", "both")
        imagination = learn and "world" in run.checkpoint["states"][0]["networks"]
        quiet = {"planner": "none"} if hasattr(run.args, "planner") and mode not in ("search", "both") else {}
        state = make_state(run, tables, [args.seed], index, imagination=imagination, **changes, **quiet)
        if mode == "random":  # all logits 0
            state.networks.policy.load_state_dict({k: 0 * p for k, p in state.networks.policy.state_dict().items()})
        loops[mode] = adaptation_loop(args, run, state, first_boards(run, index) if imagination else None, learn)

    def play_all():
        for mode, loop in loops.items():
            earned, metrics[mode] = next(loop)
            curves[mode].append(earned)

    warm_up = 3 if run.device.type == "cuda" else 1
    training = best_responses(args, run, sets, iterations, 512)
    seconds = timed(play_all, warm_up) * (rounds - warm_up)
    if iterations > warm_up:
        seconds += timed(lambda: next(training), warm_up) * (iterations - warm_up)
    print(f"about {seconds / 60:.1f} minutes to go on {run.device}", flush=True)
    for _ in tqdm(range(rounds - warm_up), desc="adaptation", unit="round", leave=False):
        play_all()
    if args.references:
        *_, best = tqdm(training, total=iterations, desc="best responses", unit="iteration", leave=False)
    for mode, found in metrics.items():
        for k, key in enumerate(sets if found else ()):
            shown = {name: x.float().reshape(len(sets), -1)[k].mean() for name, x in found.items() if name in SHOWN}
            print(f"{mode}, {key}: " + ", ".join(f"{name} {value:.3f}" for name, value in shown.items()))
    curves = {name: np.reshape(curve, (rounds, len(sets), -1, 2)) for name, curve in curves.items()}
    last = {name: curve[-(rounds // 4) :].sum(0) for name, curve in curves.items()}  # [sets, repetitions, 2]
    scores = {name: x[..., 0] / x[..., 1] for name, x in last.items()}
    table = {name: [interval(row) for row in score] for name, score in scores.items()}
    if args.references:
        table["best response"] = [(value, math.nan) for value in best]
    write_results(args, list(sets), table, curves)
    for name in [name for name in args.modes if name != "frozen" and "frozen" in scores]:
        gains = [mean_text(*interval(row)) for row in scores[name] - scores["frozen"]]
        print(f"{name} minus frozen: " + ", ".join(f"{key} {gain}" for key, gain in zip(sets, gains, strict=True)))
    return {f"{name}/{key}": row[k][0] for name, row in table.items() for k, key in enumerate(sets)}


def write_results(args: Args, sets: list[str], table: dict, curves: dict) -> None:
    """table {name: (mean, half width) per set}, curves {name: [rounds, sets, repetitions, 2]}"""
    title = "_".join(seats.replace(",", "-") for seats in args.seats)[:200] or args.sets
    start = args.run.path.parent / f"adaptation_{title}"
    parts = [f"{name} {part}" for name in table for part in ("mean", "half_width_95")]
    rows = [["co_players", *parts, *(f"{mode} normalised" for mode in args.modes)]]
    print(f"return over the last quarter of {args.steps} steps (normalised: random 0, best response 1)")
    print(" " * 42 + "".join(name.rjust(22) for name in table))
    for k, key in enumerate(sets):
        low, high = (table[name][k][0] if name in table else math.nan for name in ("random", "best response"))
        norms = {mode: (table[mode][k][0] - low) / (high - low) if high != low else math.nan for mode in args.modes}
        rows.append([key, *(value for name in table for value in table[name][k]), *norms.values()])
        texts = (mean_text(*table[name][k]) + (f" ({norms[name]:.2f})" if name in norms else "") for name in table)
        print(key.ljust(42) + "".join(text.rjust(22) for text in texts))
    figure = Figure((max(4, 2.6 * len(sets)), 2.8), layout="tight")
    axes = figure.subplots(1, len(sets), squeeze=False)
    points = [["co_players", "learner", "steps", "return"]]
    for k, (key, axis) in enumerate(zip(sets, axes[0], strict=True)):
        for name, curve in curves.items():
            total, games = np.moveaxis(curve[:, k].sum(1), 1, 0)  # [rounds]
            steps, mean = (np.arange(len(total)) + 1) * args.every, total / np.maximum(games, 1)
            axis.plot(steps, mean, label=name)
            points += [[key, name, *pair] for pair in zip(steps, mean, strict=True)]
        axis.set(title=key, xlabel="steps")
    axes[0][0].legend(fontsize=7)
    figure.savefig(f"{start}.png", dpi=75)
    write_csv(f"{start}.csv", rows)
    write_csv(f"{start}_curve.csv", points)
    print(f"wrote {start}.csv, _curve.csv and .png")


if __name__ == "__main__":
    command_line(parse_args, main)
