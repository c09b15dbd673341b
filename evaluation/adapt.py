"""A trained learner meets the same co-players in game after game, frozen or learning as it plays.

    python evaluation/adapt.py runs/RUN                     # seven sets of rule-based players
    python evaluation/adapt.py runs/RUN --sets strangers    # players that nobody trains with
    python evaluation/adapt.py runs/RUN --seats learner,waiting,waiting,waiting
    python evaluation/adapt.py runs/RUN --sets learned --others A=runs/RUN_A B=runs/RUN_B

Each set is played `--repetitions` times, by each learner of the run in turn, `--games` games side by
side. A learner learns from the first alone; the others make the score less noisy. Scores are mean
returns of the games that end in the last quarter of the steps; intervals are over training seeds. In
brackets: 0 is a random player, 1 PPO trained with exactly this set.

Every `--every` steps the learner's MOA learns from all that it saw so far, a copy for each co-player.
A copy is used where it has predicted the newest steps better, before it learned from them, than the
MOA that the learner came with. The learner then imagines whole games with its co-players as it
remembers them, and does PPO on these. It acts with the new policy where that earns more in imagined
games than the one it came with, by a standard error. A run without a world model does PPO on its real
steps, unguarded.

Beside the checkpoint: `adaptation_<set>.csv`, a row per repetition, and `.png`.
"""

import copy
import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hopplus_ppo
from evaluation import frozen_players, runs
from evaluation.bayes_hunter import bayes_probs
from evaluation.posterior import Posterior
from evaluation.runs import Run, RunArgs, copy_params, load_params

import matplotlib
import numpy as np
import torch
import tyro
from tqdm import tqdm

SHORT = {"NS": "nearest_stag", "NH": "nearest_hare", "noisy NS": "noisy_stag", "noisy NH": "noisy_hare"}
SETS = {
    "standard": ("3 NS", "3 NH", "3 random", "NS + 2 NH", "2 NS + NH", "2 NS + random", "NS + NH + random"),
    "strangers": (
        "3 noisy NS",
        "3 noisy NH",
        "3 switching",
        "3 waiting",
        "noisy NS + 2 noisy NH",
        "switching + waiting + random",
    ),
}
LEARNING = {  # flags of the script, as they are here
    "update_epochs": 4,
    "num_minibatches": 4,
    "ent_coef": 0.01,
    "critic_data": "mixed",
    "imagined_weight": 1.0,
    "ppo_real_ratio": 0.5,
}
BEST_RESPONSE = {  # of hopplus_ppo.py, whatever the run's script is
    "method": "ppo",
    "subgoals": "none",
    "imagination": False,
    "memory_discount": 0.0,
    "num_envs": 256,
    "num_steps": 32,
    "learning_rate": 1e-3,
    "update_epochs": 4,
    "num_minibatches": 4,
}
DECAY = 0.8  # of what both policies earned: how much a round counts beside the next
MOA_BATCH = 256  # steps


@dataclasses.dataclass
class Args(RunArgs):
    sets: Literal["standard", "strangers", "learned"] = "standard"  # of three co-players
    others: tuple[str, ...] = ()  # NAME=FOLDER: runs whose learners are those of --sets learned
    seats: tuple[str, ...] = ()  # own sets instead: who sits where, one learner in each
    modes: tuple[Literal["frozen", "learning"], ...] = ("frozen", "learning")
    references: bool = True  # also a random player, the Bayes hunter, and PPO trained with each set
    search: bool = False  # act as in training where that was by search (else by the policy alone)
    steps: int = 2400  # with the same co-players
    every: int | None = None  # steps between two updates (None: 50; without a world model 100)
    repetitions: int = 20  # of each set
    games: int = 8  # at once
    moa_updates: int = 16  # per round
    moa_learning_rate: float = 3e-3  # in the first round; it falls with the root of their number
    learning_rate: float | None = None  # PPO's, divided by the round (None: 5e-3); without a world model not (3e-4)
    rounds: int = 4  # batches of imagined games per round
    imagined_games: int = 128  # side by side in a batch; who ends begins anew
    best_response_steps: int = 800_000  # of PPO with each set


def set_name(players: list[str]) -> str:
    """Such as 3 NS, or NS + 2 NH"""
    short = {name: key for key, name in SHORT.items()}
    parts = []
    for name, same in itertools.groupby(players):
        count = len(list(same))
        parts.append(f"{count} {short.get(name, name)}" if count > 1 else short.get(name, name))
    return " + ".join(parts)


def deal_seats(args: Args, run: Run, others: dict[str, Run]) -> dict[str, list[str]]:
    """Name of each set of co-players -> who sits where"""
    tables = [runs.seats_of(run, seats, others) for seats in args.seats]
    if args.sets == "learned":
        tables = tables or [["learner", *players] for players in frozen_players.sets_of(list(others))]
    for name in SETS[args.sets] if not tables else ():
        table = ["learner"]
        for part in name.split(" + "):
            count, player = part.split(" ", 1) if part[0].isdigit() else ("1", part)
            table += [SHORT.get(player, player)] * int(count)
        tables.append(table)
    players = run.args.config.num_players
    for table in tables:
        wrong = table.count("learner") != 1 or "mixed" in table or len(table) != players
        runs.refuse(wrong, f"{','.join(table)}: not one learner and {players - 1} named co-players (--seats)")
    learner = [table.index("learner") for table in tables]
    sets = [table[at + 1 :] + table[:at] for table, at in zip(tables, learner, strict=True)]
    return {set_name(players): table for players, table in zip(sets, tables, strict=True)}


# ---- How a learner learns
class Starts:
    """Stands where a TrainState has its games: `imagine` begins with first steps of games"""

    def __init__(self, first: dict, rows: int, args):
        self.first = first  # [M, n, ...]
        # `imagine` looks here for how many games are real, and imagines as much as they play
        games = round(rows * args.imagination_horizon / args.num_steps)
        self.last_joint = first["last_joint"][:, :games]

    def sample(self, *_) -> dict:
        steps = {name: x[:, None] for name, x in self.first.items()}
        steps["history"] = self.history[:, None]
        return steps | {"game_number": torch.zeros_like(steps["done"], dtype=torch.int64)}


def first_steps(run: Run, numbers: list[int], count: int = 1024) -> dict:
    """Steps with which games began that are in the replay of learner numbers[m] [M, count, ...]"""
    runs.refuse(not run.replay, f"{run.folder}: there is no replay to imagine from")
    replay = {name: x for name, x in run.replay.items() if name != "history"}
    learners = []
    for number in numbers:
        begins = (replay["clock"][:, number] == 0).nonzero()
        runs.refuse(len(begins) == 0, f"{run.folder}: its replay has no first step of a game")
        pick = torch.randint(len(begins), (count,), device=begins.device)
        rollout, step, column = begins[pick].unbind(1)
        learners.append({name: x[rollout, number, step, column] for name, x in replay.items()})
    return {name: torch.stack([x[name] for x in learners]) for name in replay}


def select(which, new: dict, old: dict) -> dict:
    """Of M networks the new where which [M], else the old"""
    chosen = {}
    for name, p in new.items():
        chosen[name] = torch.where(which.view(-1, *[1] * (p.dim() - 1)), p, old[name])
    return chosen


class ModelOfEach:
    """MOA, copied for each of K co-players. Row i * K + k of [M, n * K, ...] is about the k-th"""

    def __init__(self, moa, copies: int):
        self.moa = moa
        self.copies = copies
        self.params = moa.params
        for p in self.params.values():
            p.data = p.data.repeat_interleave(copies, 0)  # [M * K, ...]

    def __call__(self, *rows):
        rows = [x.unflatten(1, (-1, self.copies)).transpose(1, 2).flatten(0, 1) for x in rows]
        log_probs = self.moa(*rows).unflatten(0, (-1, self.copies))  # [M, K, n, 7]
        return log_probs.transpose(1, 2).flatten(1, 2)


class Adaptation:
    """MOA and policy of M learners, each beside the one that it came with"""

    def __init__(self, args: Args, run: Run, state, numbers: list[int]):
        self.args = args
        self.run = run
        self.state = state
        self.policy = state.networks["policy"]
        self.old_policy = self.new_policy = copy_params(self.policy)
        self.gain = torch.zeros(len(numbers), device=state.device)  # of the new policy
        self.variance = torch.zeros_like(self.gain)
        self.moa = None
        if "moa" in state.networks:
            # HOP's is asked about two subgoals at once, so it stays one
            copies = 1 if run.args.subgoals == "hop" else run.args.config.num_players - 1
            self.moa = state.networks["moa"] = ModelOfEach(state.networks["moa"], copies)
            self.old_moa = self.new_moa = copy_params(self.moa)
            self.evidence = torch.zeros(len(numbers) * copies, device=state.device)  # for the new MOA
            self.seen = []
            head = {name: p for name, p in self.moa.params.items() if name.startswith("head.")}
            self.learned = list((head or self.moa.params).values())
            self.optimizer = torch.optim.Adam(self.learned, args.moa_learning_rate)
        self.imagining = None
        if getattr(state.args, "imagination", False):
            self.imagining = copy.copy(state)
            self.imagining.games = Starts(first_steps(run, numbers), args.imagined_games, state.args)

    def learn(self, steps: dict) -> None:
        """From the newest steps of each learner's first game [M, T, 1, ...]"""
        if self.moa is not None:
            self.learn_moa({name: x[:, :, 0] for name, x in steps.items() if name != "value"})
        load_params(self.policy, self.new_policy)
        if self.imagining is not None:
            rate = self.args.learning_rate / len(self.seen)
            self.state.optimizers["policy"].learning_rate.fill_(rate)
            self.remember(steps)
            for _ in range(self.args.rounds):
                self.improve_policy(self.run.script.imagine(self.imagining), real=False)
            self.new_policy = copy_params(self.policy)
            self.choose_policy()
        else:
            self.improve_policy(steps, real=True)
            self.new_policy = copy_params(self.policy)

    def moa_nll(self, steps: dict):
        """Of what the co-players of each copy did [M * K]"""
        probs, present, actions = runs.predict_others(self.run, self.state, steps)
        nll = -probs.gather(3, actions[..., None])[..., 0].clamp(min=1e-9).log()
        parts = [x.unflatten(2, (self.moa.copies, -1)).sum((1, 3)) for x in (nll * present, present)]
        return (parts[0] / parts[1].clamp(min=1)).flatten()

    @torch.no_grad()
    def surprise(self, params: dict, steps: dict):
        load_params(self.moa, params)
        return self.moa_nll(steps)

    def learn_moa(self, steps: dict) -> None:
        self.evidence += self.surprise(self.old_moa, steps) - self.surprise(self.new_moa, steps)
        self.seen.append(steps)
        seen = {name: torch.cat([x[name] for x in self.seen], 1) for name in steps}
        rate = self.args.moa_learning_rate / math.sqrt(len(self.seen))
        self.optimizer.param_groups[0]["lr"] = rate
        for _ in range(self.args.moa_updates):
            rows = torch.randint(seen["clock"].shape[1], (MOA_BATCH,), device=self.state.device)
            loss = self.moa_nll({name: x[:, rows] for name, x in seen.items()}).sum()
            for p, grad in zip(self.learned, torch.autograd.grad(loss, self.learned), strict=True):
                p.grad = grad
            self.optimizer.step()
        self.new_moa = copy_params(self.moa)
        load_params(self.moa, select(self.evidence > 0, self.new_moa, self.old_moa))

    def remember(self, steps: dict) -> None:
        """Imagined games begin with what was known of the co-players when one of the newest began, and
        are trusted for as many steps as the seen ones were predicted exactly"""
        starts = self.imagining.games
        begins = (steps["clock"][:, :, 0] == 0).float()  # [M, T]
        drawn = begins.multinomial(starts.first["clock"].shape[1], replacement=True)
        rows = torch.arange(len(drawn), device=drawn.device)[:, None]
        starts.history = steps["history"][rows, drawn, 0]  # [M, n, K, _]
        ahead = self.state.args.imagination_horizon
        parts = {}
        for name in ("board", "joint", "payoff", "next_board", "done"):
            parts[name] = steps[name][:, :, 0].unfold(1, ahead, 5).movedim(-1, 1)
        self.run.script.measure_horizon(self.state, parts)  # from every 5th step on

    def improve_policy(self, steps: dict, real: bool) -> None:
        batch, _ = self.run.script.make_ppo_batch(self.state.args, steps, real)
        self.run.script.ppo_update(self.state, batch)

    def imagined_return(self, params: dict):
        """Mean over imagined games [M], and what each row adds to its error [M, n], as the game pays: a
        bonus is for learning. A row holds one game after another; what follows the last end is left out"""
        load_params(self.policy, params)
        samples = self.run.script.imagine(self.imagining)
        ended = (samples["ended"] & samples["mask"]).float()  # [M, h, n]
        before_end = ended.flip(1).cumsum(1).flip(1) > 0
        paid = (samples["payoff"] * samples["mask"] * before_end).sum(1)  # [M, n]
        games = ended.sum(1)
        total = games.sum(1, keepdim=True).clamp(min=1)
        mean = paid.sum(1, keepdim=True) / total
        return mean[:, 0], (paid - mean * games) / total

    def choose_policy(self) -> None:
        with torch.random.fork_rng():  # the same numbers for both: as long as they do the same
            old, old_error = self.imagined_return(self.old_policy)
        new, new_error = self.imagined_return(self.new_policy)
        self.gain = DECAY * self.gain + new - old
        self.variance = DECAY**2 * self.variance + (new_error - old_error).square().sum(1)
        better = self.gain > self.variance.sqrt()
        load_params(self.policy, select(better, self.new_policy, self.old_policy))


# ---- Playing
def hunt_by_bayes(state) -> None:
    """From now on the scripted hunter acts in the learners' place: it knows the players of the
    --population, infers within a game who is who, and goes for what pays most"""
    env, seats = state.env, state.games.seats
    action_probs, advance = seats.action_probs, env.advance
    posterior = Posterior(seats)

    def hunter_probs(now, _):
        return action_probs(now, bayes_probs(env, seats, posterior))

    def watched_advance(actions):
        reward, present, done = advance(actions)
        posterior.update(actions, present, done)
        return reward, present, done

    seats.action_probs = hunter_probs
    env.advance = watched_advance


def learner_sums(sums: dict, seat):
    """Returns and numbers of the learners' games that ended, seat [M] -> [M, 2]"""
    row = torch.arange(len(seat))
    return torch.stack([sums[f"games/{name}"][row, seat].cpu() for name in ("return", "ended")], 1)


def play_mode(args: Args, run: Run, tables: list, others: dict[str, Run], mode: str, bar):
    """-> returns and numbers of the games that ended in each round [rounds, M, 2]"""
    repetition = np.arange(len(tables)) % args.repetitions
    seed = repetition % run.args.num_seeds
    learner = repetition // run.args.num_seeds % run.learners_each
    numbers = (seed * run.learners_each + learner).tolist()
    learns = mode == "learning"
    changes = LEARNING | {
        "seed": args.seed,
        "learning_rate": args.learning_rate,
        "num_envs": args.games,
        "num_steps": args.every,
        "imagination": learns and "world" in run.networks,
        "imagination_horizon": run.args.config.final_time,
        **({} if args.search else {"planner": "none"}),
    }
    state = frozen_players.seat_beside(run, tables, numbers, others, **changes)
    if mode == "random":  # all logits 0
        policy = state.networks["policy"]
        load_params(policy, {name: 0 * p for name, p in copy_params(policy).items()})
    if mode == "Bayes hunter":
        hunt_by_bayes(state)
    adaptation = Adaptation(args, run, state, numbers) if learns else None
    seat = torch.tensor([table.index("learner") for table in tables])
    curve = []
    for _ in range(args.steps // args.every):
        steps, sums = run.script.rollout(state, state.games)
        curve.append(learner_sums(sums, seat))
        if learns:
            adaptation.learn({name: x[:, :, :1] for name, x in steps.items()})
        bar.update(args.every * state.env.num_envs)
    return torch.stack(curve).numpy()


def best_responses(args: Args, run: Run, tables: list, others: dict[str, Run], bar):
    """PPO trained with each of these sets -> the mean return of new games [sets]"""
    config = run.args.config
    flags = BEST_RESPONSE | {"device": args.device, "config": config, "seats": ",".join(tables[0])}
    ppo = hopplus_ppo.Args(**flags)
    learner = Run(run.folder, hopplus_ppo, ppo, {}, {})
    state = frozen_players.seat_beside(learner, tables, None, others, seed=args.seed)

    def train():
        steps, _ = hopplus_ppo.rollout(state, state.games)
        batch, _ = hopplus_ppo.make_ppo_batch(ppo, steps, real=True)
        hopplus_ppo.ppo_update(state, batch)

    iterations = math.ceil(args.best_response_steps / ppo.num_envs / ppo.num_steps)
    for number in range(iterations):
        left = 1 - 0.9 * number / iterations
        state.optimizers["policy"].learning_rate.fill_(ppo.learning_rate * left)
        train()
        if number == 0:
            train = hopplus_ppo.capture(train, state)
        bar.update(ppo.num_steps * state.env.num_envs)
    seat = torch.tensor([table.index("learner") for table in tables])
    scores = [hopplus_ppo.rollout(state, state.games)[1] for _ in range(6)]
    # What is under way began with other weights.
    returns, games = sum(learner_sums(sums, seat) for sums in scores[2:]).unbind(1)
    return (returns / games).numpy()


# ---- Reporting
def draw(path: Path, args: Args, sets: list[str], curves: dict, best) -> None:
    """Mean return of each round"""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(sets), figsize=(1 + 3 * len(sets), 3), squeeze=False, layout="constrained")
    for k, (name, axis) in enumerate(zip(sets, axes[0], strict=True)):
        for mode, curve in curves.items():
            returns, games = np.moveaxis(curve[:, k].sum(1), 1, 0)
            steps = args.every * (1 + np.arange(len(games)))
            axis.plot(steps, returns / np.maximum(games, 1), label=mode)
        if best is not None:
            axis.axhline(best[k], ls="--", color="grey", label="best response")
        axis.set(title=name, xlabel="steps")
    axes[0, 0].set_ylabel("return")
    axes[0, 0].legend()
    figure.savefig(path)
    print(f"wrote {path}")


def last_quarter(args: Args, curve):
    """Mean returns of the games that ended in it. curve [rounds, ..., 2] -> [...]"""
    returns, games = np.moveaxis(curve[-(args.steps // args.every // 4) :].sum(0), -1, 0)
    return returns / games


def main(args: Args) -> list[dict]:
    run = runs.load_run(args.run, args.script, args.device)
    imagines = "world" in run.networks
    if args.every is None:
        args.every = 50 if imagines else 100
    if args.learning_rate is None:
        args.learning_rate = 5e-3 if imagines else 3e-4
    final_time = run.args.config.final_time
    whole = args.every >= final_time and args.steps % (4 * args.every) == 0
    runs.refuse(not whole, f"--steps must be 4, 8, ... times --every, and that a game, {final_time} steps")
    slow = min(args.learning_rate, args.moa_learning_rate)
    runs.refuse(slow <= 0, f"learning rates must be above 0, not {slow}")
    runs.refuse(bool(args.others) != (args.sets == "learned"), "--sets learned needs --others NAME=FOLDER")
    others = frozen_players.load_others(args.others, args.device, run.args.config)
    sets = deal_seats(args, run, others)
    tables = list(sets.values())
    repeated = [table for table in tables for _ in range(args.repetitions)]
    modes = ("random", "Bayes hunter", *args.modes) if args.references else args.modes
    total = len(modes) * args.steps * args.games * len(repeated)
    total += args.references * args.best_response_steps * len(sets)
    curves, best = {}, None
    with tqdm(total=total, unit="step", unit_scale=True, leave=False) as bar:
        for mode in modes:
            bar.set_description(mode)
            curve = play_mode(args, run, repeated, others, mode, bar)
            curves[mode] = curve.reshape(-1, len(sets), args.repetitions, 2)
        if args.references:
            bar.set_description("best responses")
            best = best_responses(args, run, tables, others, bar)

    seeds = np.arange(args.repetitions) % run.args.num_seeds
    rows = []
    scale = "; in brackets: random 0, best response 1" if args.references else ""
    print(f"mean return of the games that ended in the last {args.steps // 4} of {args.steps} steps{scale}")
    titles = (*modes, "best response") if args.references else modes
    print(" " * 30 + "".join(name.rjust(22) for name in titles))
    for k, name in enumerate(sets):
        line = name.ljust(30)
        for mode in modes:
            curve = curves[mode][:, k]
            scores = last_quarter(args, curve)
            means = [scores[seeds == seed].mean() for seed in np.unique(seeds)]
            mean, half = runs.interval(means)
            text = runs.mean_text(mean, half)
            if mode == "random":
                low = mean
            elif best is not None:
                text += f" ({(mean - low) / (best[k] - low):.2f})"
            line += text.rjust(22)
            returns = curve[..., 0] / np.maximum(curve[..., 1], 1)
            for repetition, score in enumerate(scores):
                row = {"co_players": name, "mode": mode, "repetition": repetition}
                row |= {"seed": run.args.seed + seeds[repetition], "score": score}
                for number, mean in enumerate(returns[:, repetition], 1):
                    row[f"return at {args.every * number}"] = mean
                rows.append(row)
        if best is not None:
            line += f"{best[k]:.3f}".rjust(22)
            rows.append({"co_players": name, "mode": "best response", "score": best[k]})
        print(line)
    if run.args.num_seeds > 1:
        print("±: 95 % interval over training seeds")
    title = "_".join(seats.replace(",", "-") for seats in args.seats)[:200] or args.sets
    runs.write_csv(run.folder / f"adaptation_{title}.csv", rows)
    draw(run.folder / f"adaptation_{title}.png", args, list(sets), curves, best)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Args))
