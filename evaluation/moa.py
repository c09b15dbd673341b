"""How well does MOA predict what co-players do, for each kind of co-player? `evaluate.py` asks it.

The numbers are those of `moa/...` in training, on every step of fresh games in which the co-player is on the board.
Beside MOA's stand the best that can be known: the co-player's own probabilities (ceiling), and what follows from its
past by Bayes' rule, among the players of --population (of a learner: its own probabilities again). Beside the
checkpoint: `_moa.csv`, a row for each kind and seed; `_moa_actions.csv`, a row for each kind and action;
`_moa.png`, a row of pictures for each kind.
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from evaluation.runs import ROOT, Run, Seated, check_decisions, game, learner_seeds, play, write_csv

import matplotlib.style
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F
from torch.utils._pytree import tree_map

PLACES = 64  # games at once, per seed


class Predictions(NamedTuple):
    """n actions of co-players, and what was said about each before"""

    moa: torch.Tensor  # [n, 7]
    ceiling: torch.Tensor  # [n, 7]
    bayes: torch.Tensor  # [n, 7]
    action: torch.Tensor  # int64 [n]
    kind: torch.Tensor  # int64 [n] as in Seats.kinds
    seed: torch.Tensor  # int64 [n] of the learner whose MOA was asked


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
    posterior = seats.posterior()
    transitions, outputs, episodes = play(run, state, 1)
    check_decisions(run.path, outputs["log_probs"])
    step = tree_map(lambda x: x[:, 0], transitions)
    clock = step.time / env.config.final_time
    views = script.entity_views(env, step.board, step.walls)
    belief = script.infer_opponents(args, env, state.networks, views, clock, step.history)
    noise = script.goal_noise(args, *belief.params.shape[:2], device=env.device)
    predicted = script.predict_actions(args, state.networks, belief, clock, noise).exp()
    present = belief.present  # [M, E, K]
    seed = learner_seeds(run, state).view(-1, 1, 1)
    return Predictions(
        moa=predicted[present],
        ceiling=about_others(episodes["probs"][0])[present],
        bayes=about_others(seats.posterior_probs(posterior))[present],
        action=step.joint[..., 1:].long()[present],
        kind=kind[present],
        seed=seed.expand_as(present)[present],
    )


def select(predictions: Predictions, rows: torch.Tensor) -> Predictions:
    """rows bool [n]"""
    return Predictions(*(x[rows] for x in predictions))


def by_kind(predictions: Predictions, names: list[str]) -> dict[str, Predictions]:
    """Name of each kind that was met -> what is about it"""
    parts = {}
    for kind in predictions.kind.unique().tolist():
        name = "learner" if kind == game.LEARNER else names[kind]
        parts[name] = select(predictions, predictions.kind == kind)
    return parts


def nll(probs, action) -> float:
    """Mean -log p of what was done; probs [n, 7], action [n]"""
    done = probs.gather(1, action[:, None])[:, 0]
    return float(-done.clamp(min=1e-9).log().mean())


def guesses(probs) -> torch.Tensor:
    """[n, 7] -> one-hot of the likeliest action; those that are equally likely share it"""
    likely = (probs == probs.amax(1, keepdim=True)).float()
    return likely / likely.sum(1, keepdim=True)


def top1(probs, action) -> float:
    """How often the likeliest action was done"""
    return float(guesses(probs).gather(1, action[:, None]).mean())


def scores(predictions: Predictions) -> dict[str, float]:
    moa = predictions.moa
    ceiling = predictions.ceiling
    bayes = predictions.bayes
    action = predictions.action
    return {
        "NLL": nll(moa, action),
        "NLL ceiling": nll(ceiling, action),
        "NLL Bayes": nll(bayes, action),
        "top-1": top1(moa, action),
        "top-1 ceiling": top1(ceiling, action),
        "top-1 Bayes": top1(bayes, action),
    }


class Guesses(NamedTuple):
    """Of each action: how often it was done and guessed"""

    confusion: np.ndarray  # [7, 7]: what was done, what was guessed
    recall: np.ndarray  # [7], NaN where it was never done
    precision: np.ndarray  # [7], NaN where it was never guessed


def count_guesses(probs, action) -> Guesses:
    done = F.one_hot(action, game.NUM_ACTIONS).double()
    confusion = (done.mT @ guesses(probs).double()).cpu().numpy()
    right = confusion.diagonal()
    times_done = confusion.sum(1)
    times_guessed = confusion.sum(0)
    recall = right / np.where(times_done > 0, times_done, math.nan)
    precision = right / np.where(times_guessed > 0, times_guessed, math.nan)
    return Guesses(confusion, recall, precision)


class Kind(NamedTuple):
    """What is reported of one kind of co-player"""

    scores: dict[str, float]  # of all seeds together
    seed_scores: dict[int, dict[str, float]]
    counts: dict[int, int]  # actions, by seed
    moa: Guesses
    ceiling: Guesses


def judge(part: Predictions) -> Kind:
    seed_scores = {}
    counts = {}
    for seed in part.seed.unique().tolist():
        of_seed = select(part, part.seed == seed)
        seed_scores[seed] = scores(of_seed)
        counts[seed] = len(of_seed.action)
    return Kind(
        scores=scores(part),
        seed_scores=seed_scores,
        counts=counts,
        moa=count_guesses(part.moa, part.action),
        ceiling=count_guesses(part.ceiling, part.action),
    )


# ---- Reporting


def output_paths(start: str) -> list[str]:
    return [f"{start}_moa.csv", f"{start}_moa_actions.csv", f"{start}_moa.png"]


def report(run: Run, state: Seated, start: str) -> None:
    """Prints tables with a row for each kind of co-player; writes `start`_moa.csv, _moa_actions.csv and _moa.png"""
    predictions = predict(run, state, 2 * state.games.env.config.final_time)
    parts = by_kind(predictions, state.games.seats.names)
    kinds = {name: judge(part) for name, part in parts.items()}
    print_scores(kinds)
    print_actions(kinds, "recall")
    print_actions(kinds, "precision")
    scores_path, actions_path, picture_path = output_paths(start)
    write_csv(scores_path, score_rows(kinds))
    write_csv(actions_path, action_rows(kinds))
    draw(Path(picture_path), kinds)


def print_scores(kinds: dict[str, Kind]) -> None:
    names = [*next(iter(kinds.values())).scores, "actions"]
    widths = [max(8, len(name) + 2) for name in names]
    header = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    print(f"{'MOA about':<16}{header}")
    for name, kind in kinds.items():
        texts = [f"{value:.3f}" for value in kind.scores.values()]
        texts.append(str(sum(kind.counts.values())))
        cells = "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
        print(f"{name:<16}{cells}")


def print_actions(kinds: dict[str, Kind], figure: str) -> None:
    """Recall or precision of each action, MOA's and below it the ceiling's"""
    print(f"{figure:<24}" + "".join(f"{name:>11}" for name in game.ACTION_NAMES))
    for name, kind in kinds.items():
        for label, guessed in ((name, kind.moa), (f"{name}, ceiling", kind.ceiling)):
            texts = [f"{value:.3f}" for value in getattr(guessed, figure)]
            cells = "".join(f"{text.replace('nan', '-'):>11}" for text in texts)
            print(f"{label:<24}{cells}")


def score_rows(kinds: dict[str, Kind]) -> list[list]:
    columns = list(next(iter(kinds.values())).scores)
    rows = [["kind", "seed", "actions", *columns]]
    for name, kind in kinds.items():
        rows.append([name, "all", sum(kind.counts.values()), *kind.scores.values()])
        for seed, of_seed in kind.seed_scores.items():
            rows.append([name, seed, kind.counts[seed], *of_seed.values()])
    return rows


def action_rows(kinds: dict[str, Kind]) -> list[list]:
    """Recall, precision, and the row of the confusion matrix"""
    guessed = [f"guessed {action}" for action in game.ACTION_NAMES]
    rows = [["kind", "action", "times", "recall", "recall ceiling", "precision", "precision ceiling", *guessed]]
    for name, kind in kinds.items():
        for number, action in enumerate(game.ACTION_NAMES):
            done = kind.moa.confusion[number]
            row = [
                name,
                action,
                int(done.sum().round()),
                kind.moa.recall[number],
                kind.ceiling.recall[number],
                kind.moa.precision[number],
                kind.ceiling.precision[number],
                *done,
            ]
            rows.append(row)
    return rows


def draw(path: Path, kinds: dict[str, Kind]) -> None:
    """A row for each kind: what MOA guessed, what its own probabilities would, recall, precision"""
    matplotlib.style.use(ROOT / "benchmarks" / "plots.mplstyle")
    figure = Figure((19, 0.5 + 4.7 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 4, squeeze=False, width_ratios=(1.3, 1.3, 1, 1))
    for (of_moa, of_ceiling, recall, precision), (name, kind) in zip(axes, kinds.items(), strict=True):
        draw_confusion(of_moa, name, kind.moa.confusion)
        scores = kind.scores
        of_moa.set_title(f"{name}: NLL {scores['NLL']:.3f} (ceiling {scores['NLL ceiling']:.3f})")
        of_moa.set_xlabel("MOA's likeliest action")
        draw_confusion(of_ceiling, name, kind.ceiling.confusion)
        of_ceiling.set_title(f"top-1 {scores['top-1']:.3f} (ceiling {scores['top-1 ceiling']:.3f})")
        of_ceiling.set_xlabel("ceiling: its own likeliest action")
        draw_shares(recall, kind.moa.recall, kind.ceiling.recall)
        recall.set_title(f"{name}: recall")
        recall.set_xlabel("how often it was foreseen when it was done\n(black: by its own probabilities)")
        draw_shares(precision, kind.moa.precision, kind.ceiling.precision)
        precision.set_title(f"{name}: precision")
        precision.set_xlabel("how often a guess of it was right\n(black: by its own probabilities)")
    figure.savefig(path, dpi=100)


def draw_confusion(axis, name: str, confusion: np.ndarray) -> None:
    """In each row, the shares of what was guessed when this was done"""
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1e-9)
    axis.imshow(shares, vmin=0, vmax=1, alpha=0.5, aspect="auto")
    axis.grid(visible=False)
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.005:
            axis.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=11)
    axis.set_xticks(range(game.NUM_ACTIONS), game.ACTION_NAMES, rotation=35, ha="right")
    axis.set_yticks(range(game.NUM_ACTIONS), game.ACTION_NAMES)
    axis.set_ylabel(f"what {name} did (rows: 100 %)")


def draw_shares(axis, of_moa: np.ndarray, of_ceiling: np.ndarray) -> None:
    """Bars of MOA with their digits; a black line is the ceiling"""
    for number, share in enumerate(of_moa):
        if not math.isnan(share):
            axis.barh(number, share, color="C5")
            axis.text(0.02, number, f"{share:.2f}", va="center", fontsize=11)
    line = {"marker": "|", "markersize": 20, "markeredgewidth": 2}
    axis.plot(of_ceiling, range(game.NUM_ACTIONS), ls="", color="black", **line)
    axis.set_xlim(0, 1.02)
    axis.set_ylim(game.NUM_ACTIONS - 0.5, -0.5)
    axis.set_yticks(range(game.NUM_ACTIONS), game.ACTION_NAMES)
    axis.set_ylabel("action")
