"""How well does MOA predict what co-players do, for each kind of co-player? `evaluate.py` asks it.

The numbers are those of `moa/...` in training, on every step of fresh games in which the co-player is on the board.
Beside MOA's stand the best that can be known: the co-player's own probabilities (ceiling), and what follows from its
past by Bayes' rule, among the players of --population (of a learner: its own probabilities again).
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from evaluation.runs import ROOT, Run, Seated, check_decisions, game, play, write_csv

import matplotlib.style
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F
from torch.utils._pytree import tree_map

NEEDS = ("entity_views", "infer_opponents", "predict_actions", "goal_noise")
PLACES = 64  # games at once, per seed
BINS = 15  # of the calibration error


class Predictions(NamedTuple):
    """n actions of co-players, and what was said about each before"""

    moa: torch.Tensor  # [n, 7]
    ceiling: torch.Tensor  # [n, 7]
    bayes: torch.Tensor  # [n, 7]
    action: torch.Tensor  # int64 [n]
    kind: torch.Tensor  # int64 [n] as in Seats.kinds


def predict(run: Run, state: Seated, num_steps: int) -> Predictions:
    """Plays, and asks MOA about every co-player on the board"""
    steps = [predict_step(run, state) for _ in range(num_steps)]
    return Predictions(*(torch.cat(field) for field in zip(*steps, strict=True)))


@torch.no_grad()
def predict_step(run: Run, state: Seated) -> Predictions:
    script = run.script
    args = state.args
    env = state.games.env
    seats = state.games.seats

    def about_others(x):  # [B, N, ...] by seat -> [M, E, K, ...]
        return seats.to_learners(env.seats_to_ego(x))[:, :, 1:]

    kind = about_others(seats.kinds.clone())
    transitions, outputs, episodes = play(run, state, 1)
    check_decisions(run.path, outputs["log_probs"])
    step = tree_map(lambda x: x[:, 0], transitions)
    clock = step.time / env.config.final_time
    views = script.entity_views(env, step.board, step.walls)
    belief = script.infer_opponents(args, env, state.networks, views, clock, step.history, step.oracle_id)
    noise = script.goal_noise(args, *belief.params.shape[:2], device=env.device)
    predicted = script.predict_actions(args, state.networks, belief, clock, noise).exp()
    present = belief.present
    return Predictions(
        moa=predicted[present],
        ceiling=about_others(episodes["probs"][0])[present],
        bayes=about_others(episodes["bayes_probs"][0])[present],
        action=step.joint[..., 1:].long()[present],
        kind=kind[present],
    )


def by_kind(predictions: Predictions, names: list[str]) -> dict[str, Predictions]:
    """Name of each kind that was met -> what is about it"""
    parts = {}
    for kind in predictions.kind.unique().tolist():
        name = "learner" if kind == game.LEARNER else names[kind]
        of_kind = predictions.kind == kind
        parts[name] = Predictions(*(x[of_kind] for x in predictions))
    return parts


def nll(probs, action) -> float:
    """Mean -log p of what was done; probs [n, 7], action [n]"""
    done = probs.gather(1, action[:, None])[:, 0]
    return float(-done.clamp(min=1e-9).log().mean())


def guesses(probs) -> torch.Tensor:
    """[n, 7] -> one-hot of the likeliest action; those that are equally likely share it"""
    likely = (probs == probs.amax(1, keepdim=True)).float()
    return likely / likely.sum(1, keepdim=True)


def top3(probs, action) -> float:
    """How often fewer than three actions were thought likelier than what was done"""
    done = probs.gather(1, action[:, None])
    return float(((probs > done).sum(1) < 3).float().mean())


def calibration_error(probs, action) -> float:
    """ECE: in bins of the confidence, by how much it differs from how often it is right"""
    confidence = probs.amax(1)
    right = guesses(probs).gather(1, action[:, None])[:, 0]
    number = (confidence.nan_to_num() * BINS).long().clamp(0, BINS - 1)
    gaps = torch.zeros(BINS, device=probs.device).index_add(0, number, confidence - right)
    return float(gaps.abs().sum() / len(action))


def confusion(probs, action) -> np.ndarray:
    """[what was done, what was guessed]: how often"""
    done = F.one_hot(action, game.NUM_ACTIONS).double()
    return (done.mT @ guesses(probs).double()).cpu().numpy()


def scores(predictions: Predictions) -> dict[str, float]:
    moa = predictions.moa
    action = predictions.action
    right = guesses(moa).gather(1, action[:, None])
    return {
        "NLL": nll(moa, action),
        "ceiling": nll(predictions.ceiling, action),
        "Bayes": nll(predictions.bayes, action),
        "top-1": float(right.mean()),
        "top-3": top3(moa, action),
        "ECE": calibration_error(moa, action),
    }


def recall_and_precision(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each action [7]; NaN where it was never done, or never guessed"""
    right = table.diagonal()
    done = table.sum(1)
    guessed = table.sum(0)
    recall = right / np.where(done > 0, done, math.nan)
    precision = right / np.where(guessed > 0, guessed, math.nan)
    return recall, precision


def report(run: Run, state: Seated, start: str) -> None:
    """Prints a line for each kind of co-player; writes `start`_moa.csv and .png"""
    predictions = predict(run, state, 2 * state.games.env.config.final_time)
    parts = by_kind(predictions, state.games.seats.names)
    tables = {}
    rows = [["kind", "action", "times", "recall", "precision"]]
    for name, part in parts.items():
        shown = ", ".join(f"{key} {value:.3f}" for key, value in scores(part).items())
        print(f"MOA about {name:<14} {shown} ({len(part.action)} actions)")
        tables[name] = confusion(part.moa, part.action)
        recall, precision = recall_and_precision(tables[name])
        for number, action in enumerate(game.ACTION_NAMES):
            times = int(tables[name][number].sum().round())
            rows.append([name, action, times, recall[number], precision[number]])
    write_csv(f"{start}_moa.csv", rows)
    draw_confusion(Path(f"{start}_moa.png"), tables)


def draw_confusion(path: Path, tables: dict[str, np.ndarray]) -> None:
    """A table for each kind; in each row the shares of what was guessed when this was done"""
    matplotlib.style.use(ROOT / "benchmarks" / "plots.mplstyle")
    figure = Figure((1 + 4.4 * len(tables), 5.0), layout="tight")
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    for axis, (name, table) in zip(axes, tables.items(), strict=True):
        shares = table / np.maximum(table.sum(1, keepdims=True), 1e-9)
        axis.imshow(shares, vmin=0, vmax=1, alpha=0.5)
        axis.grid(visible=False)
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                axis.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=10)
        axis.set_xticks(range(game.NUM_ACTIONS), game.ACTION_NAMES, rotation=90)
        axis.set_yticks(range(game.NUM_ACTIONS), game.ACTION_NAMES)
        axis.set(
            title=f"co-player: {name}",
            xlabel="MOA's likeliest action (rows add up to 100 %)",
            ylabel="what the co-player did",
        )
    figure.savefig(path, dpi=100)
