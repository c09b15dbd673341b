"""What do the inferred subgoals tell? A probe and a picture, on fresh games of a checkpoint's learners.

    python evaluation/subgoals.py runs/RUN
    python evaluation/subgoals.py runs/RUN --seats learner,mixed,mixed,mixed

A linear probe of g_j, one for each seed, fitted to every other place of games, says which prey co-player j will take in
this game (stag, hare, nothing); beside it stands what always naming the most frequent prey would score. Beside the
checkpoint: `subgoals_<seats>.csv`, accuracy by step of the game, `_seeds.csv`, accuracy of each seed, and `.png`. What
follows `--` are flags of the script.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation import runs
from evaluation.runs import Run, RunFlags, Seated, check_writable, play, seats_of, write_csv

import numpy as np
import torch
import tyro
from torch.nn import functional as F

GAMES_EACH = 3  # in each place, after the first; 4 * final_time steps hold at least these
PREY = {"nothing": "#999999", "stag": "#D55E00", "hare": "#0072B2"}  # and their colours


@dataclasses.dataclass
class SubgoalFlags:
    seats: str | None = None
    """who sits where (None: as in training)"""
    games: Annotated[int, (">= 2", 2, game.MOST)] = 1000
    """how many games the subgoals are read in, per seed of the run; half of them are for the test"""


@dataclasses.dataclass
class Args(RunFlags, SubgoalFlags):
    path: str = tyro.MISSING
    run: Run | None = None

    @property
    def places(self) -> int:
        return max(2, math.ceil(self.games / GAMES_EACH))


def parse_args(words: list[str]) -> Args:
    return runs.parse_args(words, Args, {"run": RunFlags, "subgoals": SubgoalFlags})


def others_exited(run: Run, transitions) -> torch.Tensor:
    """bool [M, T, E, K]: which co-players left with the step"""
    return run.script.exited(run.args.config, transitions.board, transitions.next_board)[..., 1:]


def others_cells(run: Run, transitions) -> torch.Tensor:
    """uint8 [M, T, E, K]: where co-players stand before the step (H*W: they have left)"""
    return transitions.board[..., 1 : run.args.config.num_players]


def prey_taken(run: Run, transitions) -> tuple[torch.Tensor, ...]:
    """-> in the game of each step, which prey each co-player takes (its place in PREY) [M, T, E, K]; which game of its
    place it is [M, T, E]"""
    done = transitions.done.int()
    exited = others_exited(run, transitions)
    hunted = transitions.joint[..., 1:].long() - game.STAY
    number = done.cumsum(1) - done  # [M, T, E] which game of its place
    taken = torch.zeros(exited.shape, dtype=torch.int64, device=done.device)  # [M, T, E, K]
    for k in range(int(number.max()) + 1):
        this_game = (number == k)[..., None]
        caught = torch.where(exited & this_game, hunted, 0).amax(1, keepdim=True)
        taken = torch.where(this_game, caught, taken)
    return taken, number


def collect(run: Run, state: Seated) -> tuple[torch.Tensor, ...]:
    """GAMES_EACH games in each place, after the first -> subgoals [n, D], prey taken [n], step of
    the game [n], place [n], seed of the learner [n]"""
    config = run.args.config
    transitions, outputs, _ = play(run, state, 4 * config.final_time)
    taken, number = prey_taken(run, transitions)
    done = transitions.done
    in_these = (number >= 1) & (number <= GAMES_EACH)
    present = others_cells(run, transitions) < config.num_cells
    counts = in_these[..., None] & present
    place = torch.arange(done.shape[2], device=done.device).view(1, 1, -1, 1).expand_as(taken)
    goals = outputs["goals"].float().unflatten(3, (taken.shape[3], -1))
    clock = transitions.time.long()[..., None].expand_as(taken)
    seed = runs.learner_seeds(run, state).view(-1, 1, 1, 1).expand_as(taken)
    return tuple(x[counts].cpu() for x in (goals, taken, clock, place, seed))


def fit_probe(goals, taken):
    """-> a function: subgoals [n, D] -> which prey [n]"""
    mean = goals.mean(0)

    def inputs(goals):
        return torch.cat([goals - mean, torch.ones(len(goals), 1)], 1).double()

    weights = torch.linalg.pinv(inputs(goals)) @ F.one_hot(taken, len(PREY)).double()
    return lambda goals: (inputs(goals) @ weights).argmax(1)


def fit_probes(goals, taken, seed):
    """Subgoals of another seed mean something else: each seed has a probe. -> a function: subgoals [n, D], seeds [n]
    -> which prey [n]"""
    probes = {}
    for number in seed.unique().tolist():
        of_seed = seed == number
        probes[number] = fit_probe(goals[of_seed], taken[of_seed])

    def probe(goals, seed):
        prey = torch.zeros(len(goals), dtype=torch.int64)
        for number, probe_of_seed in probes.items():
            of_seed = seed == number
            prey[of_seed] = probe_of_seed(goals[of_seed])
        return prey

    return probe


def seed_rows(right: np.ndarray, taken: torch.Tensor, seed: np.ndarray) -> list[list]:
    """Of each seed what the probe scores, and what always naming its most frequent prey would"""
    rows = [["seed", "probe", "majority", "samples"]]
    for number in np.unique(seed).tolist():
        of_seed = seed == number
        counts = F.one_hot(taken[of_seed], len(PREY)).sum(0)
        samples = int(of_seed.sum())
        rows.append([number, float(right[of_seed].mean()), int(counts.max()) / samples, samples])
    return rows


def main(args: Args) -> dict[str, float]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    run = args.run
    config = run.args.config
    read = run.args.subgoals not in ("none", "hop")
    game.refuse(not read, f"{run.path}: its policy reads no subgoals (--method {run.args.method})")
    table = seats_of(run, args.seats)
    title = run.path.parent / f"subgoals_{'-'.join(table)}"
    outputs = [f"{title}.csv", f"{title}_seeds.csv", f"{title}.png"]
    check_writable(*outputs)
    index = runs.learner_indices(run, table, run.num_seeds)
    state = runs.seat_learners(
        run,
        [table] * run.num_seeds,
        args.seed,
        index,
        seats=",".join(table),
        imagination=False,
        num_envs=args.places,
    )
    goals, taken, clock, place, seed = collect(run, state)
    held_out = place % 2 == 1
    probe = fit_probes(goals[~held_out], taken[~held_out], seed[~held_out])
    right = (probe(goals, seed) == taken)[held_out].numpy()
    clock = clock[held_out].numpy()
    shares = F.one_hot(taken[held_out], len(PREY)).double().mean(0)
    majority = float(shares.max())
    steps, counts = np.unique(clock, return_counts=True)
    accuracy = [float(right[clock == step].mean()) for step in steps]
    played = f"{args.places * GAMES_EACH} games a seed, {run.num_seeds} seed(s)"
    print(f"{config.setting}, {run.path}; {played}; {len(right)} steps of co-players in the test")
    print(f"probe {right.mean():.3f}, always the most frequent prey {majority:.3f}")
    rows = zip(steps.tolist(), accuracy, counts.tolist(), strict=True)
    write_csv(f"{title}.csv", [["step", "accuracy", "samples"], *rows])
    write_csv(f"{title}_seeds.csv", seed_rows(right, taken[held_out], seed[held_out].numpy()))

    plt.style.use(runs.ROOT / "benchmarks" / "plots.mplstyle")
    figure, (scatter, curve) = plt.subplots(1, 2, figsize=(11, 4))
    centred = goals - goals.mean(0)
    spot = (centred @ torch.linalg.svd(centred, full_matrices=False)[2][:2].T).numpy()
    for number, (name, colour) in enumerate(PREY.items()):
        of_prey = spot[(taken == number).numpy()]
        scatter.scatter(*of_prey[:1500].T, s=4, alpha=0.4, color=colour, label=f"{name} ({len(of_prey)})")
    scatter.set(title="subgoals on their two main axes, by the prey taken")
    curve.plot(steps, accuracy, label=f"probe ({right.mean():.2f})")
    curve.axhline(majority, ls="--", color="grey", label=f"most frequent prey ({majority:.2f})")
    curve.bar(steps, 0.25 * counts / counts.max(), alpha=0.3, label=f"samples (highest: {counts.max()})")
    curve.set(title="does g tell which prey?", xlabel="step of the game", ylabel="accuracy", ylim=(0, 1.02))
    for axis in (scatter, curve):
        axis.legend()
    figure.tight_layout()
    figure.savefig(f"{title}.png", dpi=100)
    plt.close(figure)
    for path in outputs:
        print(f"wrote {path}")
    return {"probe_accuracy": float(right.mean()), "majority": majority}


if __name__ == "__main__":
    game.command_line(parse_args, main)
