"""How long does the world model predict boards exactly? `evaluate.py` asks it.

It goes on for up to 20 steps on its own boards, with the actions that were played; no cell may be wrong, after any of
them. It is asked in fresh games in these seats, and in games of rule-based players: learners that hunt well leave the
board before 20 steps are over. What counts is a stretch of one game in which the learner is on the board until the
last step. Beside the checkpoint: `_world_model.csv`, a row for each seed, kind of game and number of steps.

By itself it measures a saved world model like `pretrain_world_model.py`, on games of rule-based players that it never
saw, on its own board or on another. Beside the checkpoint: `world_model_<setting>.csv`.

    python evaluation/world_model.py runs/RUN                          # of pretrain_world_model.py, or of a run
    python evaluation/world_model.py runs/RUN --height 6 --width 9     # on another board
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pretrain_world_model as pretraining
import stag_hunt_env as game
from evaluation import runs
from evaluation.runs import Run, Seated, play, write_csv

import torch
import tyro

STEPS_AHEAD = 20
SHOWN = (1, 5, 10, 20)
STARTS = 16  # in each place


class Match(NamedTuple):
    """k = 1, 2, ... steps ahead, of each learner"""

    exact: torch.Tensor  # float64 [M, k] in how many stretches all boards are right
    stretches: torch.Tensor  # float64 [M, k] of so many


@torch.no_grad()
def match_boards(run: Run, state: Seated) -> Match:
    """Plays, and predicts the same steps again from STARTS steps of every place on"""
    script = run.script
    config = run.args.config
    ahead = min(STEPS_AHEAD, config.final_time)
    transitions, _, _ = play(run, state, STARTS + ahead)
    before = transitions.done.int().cumsum(1) - transitions.done.int()  # which game of its place
    on_board = script.learner_mask(config, transitions.board)

    def steps(field, k):  # [M, T, E, ...] -> what comes k steps after each start [M, STARTS * E, ...]
        return field[:, k : k + STARTS].flatten(1, 2)

    board = steps(transitions.board, 0)
    exact = torch.ones(board.shape[:2], dtype=torch.bool, device=board.device)
    exact_sums = []
    stretch_sums = []
    for k in range(ahead):
        board, _ = script.predict_step(
            state.networks.world,
            board,
            steps(transitions.walls, k),
            steps(transitions.joint, k),
        )
        exact = exact & (board == steps(transitions.next_board, k)).all(2)
        same_game = steps(before, k) == steps(before, 0)
        counts = same_game & steps(on_board, k)
        exact_sums.append((exact & counts).sum(1))
        stretch_sums.append(counts.sum(1))
    return Match(torch.stack(exact_sums, 1).double(), torch.stack(stretch_sums, 1).double())


def watching(run: Run, state: Seated, table: list[str], seed: int) -> Seated:
    """The same learners look on while rule-based players sit everywhere"""
    run.script.seed_everything([seed], rank=0, stream=0)
    tables = [table] * state.games.seats.num_blocks
    games = run.script.Games(state.args, tables, run.device, watch=True)
    return state._replace(games=games)


def share(exact: float, stretches: float) -> float:
    """NaN where no stretch is so long"""
    return exact / stretches if stretches else math.nan


def output_paths(start: str) -> list[str]:
    return [f"{start}_world_model.csv"]


def report(run: Run, state: Seated, table: list[str], seed: int, start: str) -> None:
    """Prints a line for each kind of game, over all seeds; writes `start`_world_model.csv"""
    num_seeds = state.games.seats.num_blocks
    rows = [["games", "seed", "steps", "exact", "stretches"]]
    for name, seated in (("these seats", state), ("rule-based", watching(run, state, table, seed))):
        match = match_boards(run, seated)
        exact = match.exact.unflatten(0, (num_seeds, -1)).sum(1)  # [S, k]
        stretches = match.stretches.unflatten(0, (num_seeds, -1)).sum(1)
        texts = []
        for k in SHOWN:
            if k <= exact.shape[1]:
                of_all = share(float(exact[:, k - 1].sum()), float(stretches[:, k - 1].sum()))
                texts.append(f"{k} {of_all:.4f} ({int(stretches[:, k - 1].sum())})")
        print(f"world model, boards exact after so many steps (stretches), {name}: {', '.join(texts)}")
        for index in range(num_seeds):
            for k in range(exact.shape[1]):
                count = int(stretches[index, k])
                exact_share = share(float(exact[index, k]), count)
                rows.append([name, run.args.seed + index, k + 1, exact_share, count])
    (path,) = output_paths(start)
    write_csv(path, rows)


# ---- A saved world model by itself


@dataclasses.dataclass
class Args:
    path: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PATH")]]
    """a checkpoint of pretrain_world_model.py or of a training script, or a run folder"""
    height: int | None = None
    """rows of the board (None: as in training)"""
    width: int | None = None
    """columns of the board (None: as in training)"""
    games: int = 1000
    """held-out games for each seed of the run"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to measure; auto: on the GPU if there is one"""


def parse_args(words: list[str]) -> Args:
    return tyro.cli(Args, args=words, description=__doc__)


def main(args: Args) -> dict[str, float]:
    """-> metrics, averaged over the models"""
    device = game.resolve_device(args.device)
    path = game.find_checkpoint(args.path)
    checkpoint = game.load_checkpoint(path, runs.open_checkpoint(path)["format"])
    trained = checkpoint["states"][0] if "states" in checkpoint else checkpoint
    networks = trained.get("networks", {})
    game.refuse("world" not in networks, f"{path} holds no world model")
    weights = networks["world"]
    saved = checkpoint["args"]
    config = game.StagHuntConfig(**saved["config"])
    head = saved.get("wm_head", "structured")
    size = {"height": args.height, "width": args.width}
    size = {name: value for name, value in size.items() if value is not None}
    unknown = head == "pixel" and size != {}
    game.refuse(unknown, f"{path}: the pixel head knows one board, {config.height}x{config.width}")
    config = dataclasses.replace(config, **size)
    flags = pretraining.make_args(
        seed=saved["seed"],
        num_seeds=saved["num_seeds"],
        population=saved["population"],
        num_transitions=saved.get("num_transitions", 1),
        held_out_games=args.games,
        wm_head=head,
        wm_hidden=saved["wm_hidden"],
        config=config,
    )
    pretraining.validate(flags)
    table = path.parent / f"world_model_{config.setting}.csv"
    runs.check_writable(table)

    num_models = len(next(iter(weights.values())))
    games = []
    for seed in pretraining.run_seeds(flags):
        _, held_out = pretraining.collect_games(flags, config, seed, device)
        games += [held_out] * (num_models // flags.num_seeds)
    world = pretraining.make_world_model(flags, config, list(range(num_models)), device)
    world.load_state_dict(weights)
    data = pretraining.make_dataset(games)
    predicted = pretraining.predict_all(config, world, data)
    metrics, details = pretraining.one_step_metrics(config, data, predicted)
    metrics |= details | pretraining.steps_ahead(config, world, games)
    print(f"{config.setting}, {path}, {num_models} model(s), {args.games} held-out games a seed")
    rows = [["metric", "mean", "half_width_95", *(f"model_{number}" for number in range(num_models))]]
    means = {}
    for name, x in metrics.items():
        mean, half = runs.interval(x.cpu())
        rows.append([name, mean, half, *x.tolist()])
        print(f"{name:<28}{mean:>14.6g} ± {half:.2g}".replace(" ± nan", ""))
        means[name] = mean
    write_csv(table, rows)
    print(f"wrote {table}")
    return means


if __name__ == "__main__":
    game.command_line(parse_args, main)
