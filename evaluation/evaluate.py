"""Frozen learners of a run: what they earn and hunt, and what their models know. And a film.

    python evaluation/evaluate.py runs/RUN                          # in the seats of the training
    python evaluation/evaluate.py runs/RUN --seats learner,nearest_stag,nearest_hare,waiting
    python evaluation/evaluate.py runs/RUN --no-search              # of hopplus_mcts.py, by the policy
    python evaluation/evaluate.py runs/RUN --height 6 --width 9     # the world model on this board, too
    python evaluation/evaluate.py runs/RUN --script my_copy.py      # an edited copy of the script

* **return, stag, hare**: of each seat, per game.
* **MOA**, by kind of co-player, on every step at which it is on the board: negative log-likelihood
  (NLL, nats) of what it did, and how often that was the likeliest action (top-1, ties share). Beside
  them those of its own probabilities, the best possible, and of what Bayes' rule predicts from its
  past, among the players of --population. Recall: how often each action was foreseen.
* **world model**: goes on with its own boards, by the actions that were played. In how many stretches
  of a game was every cell right so far, or every payoff? In these seats, and in fresh games of
  rule-based players. Of a run of pretrain_world_model.py that is all.
* **probe**: does a subgoal tell which prey its co-player will take? A linear classifier of each seed,
  fitted in every other place of games, says it in the others.

Beside the checkpoint: `evaluation_<seats>.csv`, a row per figure and seed, `.png` and `.gif`.
"""

import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation import runs
from evaluation.posterior import Posterior
from evaluation.runs import Run, RunArgs

import matplotlib
import numpy as np
import torch
import tyro
from torch.nn import functional as F
from tqdm import tqdm

PREY = ("nothing", "stag", "hare")
FILMED = 3  # games in the film
AHEAD = 20  # most steps of the world model
SHOWN_AHEAD = (1, 5, 10, 20)
STARTS = 16  # of stretches, in each of so many places (measure_horizon reads 1024 stretches)
PLACES = 64
ROUNDS = 8  # of a world model alone


@dataclasses.dataclass
class Args(RunArgs):
    seats: str | None = None  # who sits where: learner, mixed, players, strangers (None: as in training)
    games: int = 1000  # per seed
    search: bool = True  # as in training
    height: int | None = None  # of another board, for the world model alone
    width: int | None = None


class Played(NamedTuple):
    """By game [each, S, places, N]: returns, prey (its place in PREY). Of each action of a co-player
    on the board [n]: what was said about it, and by whom. Names of the kinds; frames of the film"""

    returns: torch.Tensor
    prey: torch.Tensor
    about: dict
    names: list[str]
    frames: list


# ---- Playing
def note_steps(env, seats) -> dict:
    """A dict that holds, after each step of these games, what was there and what was done"""
    last = {}
    advance = env.advance
    action_probs = seats.action_probs

    def noted_probs(*given):
        last["probs"] = action_probs(*given)
        return last["probs"]

    def noted_advance(actions):
        last["before"] = game.State(*(x.clone() for x in env.state))
        last["returns"] = env.episode_return.clone()
        last["kinds"] = seats.kinds.clone()
        last["actions"] = actions
        outcome = advance(actions)
        last["reward"], last["present"], last["done"] = outcome
        return outcome

    env.advance = noted_advance
    seats.action_probs = noted_probs
    return last


def kind_names(seats, kinds) -> list[str]:
    return ["learner" if kind < 0 else seats.names[kind] for kind in kinds.tolist()]


def film_frames(env, seats, last: dict, place: int) -> list:
    """This place before the last step; and after it, if the game ended"""

    def render(state, returns, hunting=None):
        here = slice(place, place + 1)
        state = game.State(*(x[here] for x in state))
        return game.render_rgb(env, state, returns[here], names, hunting)

    names = kind_names(seats, last["kinds"][place])
    frames = [render(last["before"], last["returns"], last["actions"][place])]
    if last["done"][place]:
        frames += [render(env.final_state, env.final_return)] * 3
    return frames


def play(args: Args, run: Run, table: list[str]) -> Played:
    """--games games of each seed, in many places, one after the other in each"""
    each = math.ceil(args.games / 256)
    seeds = run.args.num_seeds
    places = math.ceil(args.games / each)
    state = seat_all(run, table, args, num_envs=places, num_steps=1)
    env, seats = state.env, state.games.seats
    last = note_steps(env, seats)
    posterior = Posterior(seats, remember=state.args.memory_discount > 0)
    shape = each, *seats.kinds.shape  # [each, B, N]
    returns = torch.zeros(shape, device=env.device)
    prey = torch.zeros(shape, dtype=torch.int64, device=env.device)
    number = torch.zeros_like(prey[0, :, 0])  # of the game in each place
    place = torch.arange(len(number), device=env.device)

    def about_others(x):  # [B, N, ...] by seat -> [M, E, K, ...]
        return seats.to_learners(env.seats_to_ego(x))[:, :, 1:]

    who = torch.arange(seats.kinds.numel(), device=env.device).view_as(seats.kinds)
    who = about_others(who)  # place * N + seat
    learner = torch.arange(len(who), device=env.device).view(-1, 1, 1)
    seed = (learner // (len(who) // seeds)).expand_as(who)
    said = []
    frames = [[] for _ in range(min(FILMED, places))]  # of the first game in the first places
    bar = tqdm(total=each * len(number), desc="games", leave=False)
    while (number < each).any():
        steps, _ = run.script.rollout(state, state.games)
        counts = number < each
        for filmed, film in enumerate(frames):
            if number[filmed] == 0:
                film += film_frames(env, seats, last, filmed)
        if state.args.has_models:
            step = {name: x[:, 0] for name, x in steps.items() if name != "value"}
            moa, present, action = runs.predict_others(run, state, step)
            asked = present & seats.per_learner(counts)[..., None]
            clock = step["clock"][..., None].expand_as(who) * env.config.final_time
            goals = step["goals"].unflatten(2, (who.shape[2], -1))
            bayes = about_others(posterior.action_probs(last["probs"]))
            about = {"moa": moa, "its own": step["others_probs"], "Bayes": bayes, "action": action}
            about |= {"kind": about_others(last["kinds"]), "who": who, "seed": seed, "goal": goals}
            about |= {"game": seats.per_learner(number)[..., None].expand_as(who), "clock": clock}
            said.append({name: x[asked].cpu() for name, x in about.items()})
            posterior.update(last["actions"], last["present"], last["done"])
        ended = last["done"] & counts
        index = number[ended], place[ended]
        returns[index] = env.final_return[ended]
        prey[index] = (env.final_prey[ended] - game.STAY).clamp(min=0)
        number += last["done"]
        bar.update(int(ended.sum()))
    bar.close()
    prey = prey.cpu()
    about = {name: torch.cat([x[name] for x in said]) for name in said[0]} if said else {}
    if said:
        who = about.pop("who")
        about["prey"] = prey.flatten(1)[about.pop("game"), who]
        about["place"] = who // env.config.num_players
    returns, prey = (x.unflatten(1, (seeds, places)) for x in (returns.cpu(), prey))
    return Played(returns, prey, about, seats.names, [*itertools.chain(*frames)])


def seat_all(run: Run, table: list[str], args: Args, **changes):
    """Learners of all seeds, in the seats of table"""
    seats = [seat for seat, name in enumerate(table) if name == "learner"]
    seeds = range(run.args.num_seeds)
    numbers = [runs.learner_number(run, seed, seat) for seed in seeds for seat in seats]
    changes["seed"] = args.seed
    if not args.search and hasattr(run.args, "planner"):
        changes["planner"] = "none"
    return runs.seat_learners(run, [table] * run.args.num_seeds, numbers, **changes)


# ---- Figures
def row_of(measure: str, about: str, seed: int, value, count, half=math.nan) -> dict:
    """half: the half width of its 95 % interval over games"""
    row = {"measure": measure, "about": about, "seed": seed, "value": float(value)}
    return row | {"half_width_95": half, "count": int(count)}


def game_rows(played: Played, table: list[str], first_seed: int) -> list[dict]:
    """Return and catches of each seat, and of the learners together"""
    learners = [seat for seat, name in enumerate(table) if name == "learner"]
    groups = {f"seat {seat} {name}": [seat] for seat, name in enumerate(table)}
    groups["learners"] = learners
    figures = {"return": played.returns}
    figures |= {name: (played.prey == PREY.index(name)).float() for name in PREY[1:]}
    rows = []
    for (about, seats), (measure, x) in itertools.product(groups.items(), figures.items()):
        for number, of_seed in enumerate(x[..., seats].mean(3).unbind(1)):
            mean, half = runs.interval(of_seed.flatten())
            rows.append(row_of(measure, about, first_seed + number, mean, of_seed.numel(), half))
    return rows


def guesses(probs) -> torch.Tensor:
    """[n, 7] -> the likeliest action, one-hot; those that are equally likely share it"""
    likely = (probs == probs.amax(1, keepdim=True)).double()
    return likely / likely.sum(1, keepdim=True)


def moa_figures(about: dict) -> dict[str, float]:
    """NLL and top-1 of MOA, of the co-player's own probabilities, of Bayes' rule; recall by action"""
    action = about["action"]
    figures = {}
    for name, probs in {"": about["moa"], " its own": about["its own"], " Bayes": about["Bayes"]}.items():
        done = probs.gather(1, action[:, None])[:, 0]
        figures[f"NLL{name}"] = -done.clamp(min=1e-9).log().mean()
        right = guesses(probs).gather(1, action[:, None])[:, 0]
        figures[f"top-1{name}"] = right.mean()
        if name != " Bayes":
            for number, word in enumerate(game.ACTION_NAMES):
                figures[f"recall of {word}{name}"] = right[action == number].mean()
    return {name: float(x) for name, x in figures.items()}


def select(about: dict, rows) -> dict:
    return {name: x[rows] for name, x in about.items()}


def moa_rows(about: dict, names: list[str], first_seed: int) -> list[dict]:
    rows = []
    for kind, seed in itertools.product(about["kind"].unique().tolist(), about["seed"].unique().tolist()):
        part = select(about, (about["kind"] == kind) & (about["seed"] == seed))
        name = "learner" if kind < 0 else names[kind]
        counts = F.one_hot(part["action"], game.NUM_ACTIONS).sum(0)
        done = dict(zip(game.ACTION_NAMES, counts.tolist(), strict=True))
        for measure, value in moa_figures(part).items() if len(part["action"]) else ():
            action = measure.removeprefix("recall of ").removesuffix(" its own")
            count = done.get(action, len(part["action"]))
            rows.append(row_of(measure, name, first_seed + seed, value, count))
    return rows


def probe_rows(about: dict, first_seed: int) -> list[dict]:
    """A linear probe of each seed, fitted in every other place: in all steps of a game, and by step"""
    rows = []
    for number in about["seed"].unique().tolist():
        part = select(about, about["seed"] == number)
        inputs = F.pad(part["goal"], (0, 1), value=1.0).double()
        held_out = part["place"] % 2 == 1
        if held_out.all() or not held_out.any():
            continue
        wanted = F.one_hot(part["prey"], len(PREY)).double()
        weights = torch.linalg.pinv(inputs[~held_out]) @ wanted[~held_out]
        taken = part["prey"][held_out]
        right = ((inputs @ weights).argmax(1)[held_out] == taken).double()
        seed = first_seed + number
        most = F.one_hot(taken, len(PREY)).sum(0).max() / len(taken)
        rows.append(row_of("probe", "all steps", seed, right.mean(), len(taken)))
        rows.append(row_of("most frequent prey", "all steps", seed, most, len(taken)))
        step = part["clock"][held_out].round().long()
        for time in step.unique().tolist():
            then = step == time
            rows.append(row_of("probe", f"step {time}", seed, right[then].mean(), then.sum()))
    return rows


def exact_boards(run: Run, state, games, rounds: int = 1) -> tuple:
    """-> of each learner, for 1, 2, ... steps: of how many stretches all cells were right, of how many
    all payoffs [2, M, steps]; and how many there were [M, steps]. The learner is on the board until
    the last step of a stretch"""
    ahead = state.args.imagination_horizon
    right = total = 0
    for _ in tqdm(range(rounds), desc="world model", leave=False):
        steps, _ = run.script.rollout(state, games)
        parts = {}
        for name in ("board", "joint", "payoff", "next_board", "done"):
            starts = [steps[name][:, start : start + ahead] for start in range(STARTS)]
            parts[name] = torch.cat(starts, 2)  # [M, ahead, STARTS * places, ...]
        metrics = run.script.measure_horizon(state, parts)
        done = parts["done"].int()
        same_game = done.cumsum(1) == done
        there = parts["board"][..., 0] < state.args.config.num_cells
        counts = (there & same_game).sum(2)
        shares = []
        for name in ("exact", "payoff"):
            found = [metrics[f"wm/{name}_match/{k + 1}"] for k in range(ahead)]
            shares.append(torch.stack(found, 1))
        right = right + torch.stack(shares) * counts
        total = total + counts
    return right, total


def load_world_model(args: Args, path: Path) -> Run | None:
    """Of a checkpoint of pretrain_world_model.py: a run of hopplus_ppo.py that has nothing else"""
    try:
        saved = torch.load(path, map_location=args.device, weights_only=True)
    except Exception:  # load_run says what is wrong with it
        return None
    networks = saved.get("networks")
    if networks is None:
        return None
    found = ", ".join(networks)
    runs.refuse("world" not in networks, f"{path} has no world model that reads boards, but {found}")
    script = runs.load_script(Path(args.script or runs.ROOT / "hopplus_ppo.py"))
    flags = {name: saved["args"][name] for name in ("seed", "num_seeds", "population", "wm_hidden")}
    config = game.StagHuntConfig(**saved["args"]["config"])
    flags = script.Args(**flags, config=config, device=args.device, share_parameters=True)
    return Run(path.parent, script, flags, networks, {})


def world_state(run: Run, args: Args, config: game.StagHuntConfig, **changes):
    """All learners of the run, of whom only the world model is loaded, for games that they watch"""
    flags = runs.FROZEN | changes | {"offline_ratio": 0.5, "config": config, "seed": args.seed}
    if run.args.share_parameters:  # a learner looks from every seat
        flags |= {"share_parameters": True, "num_envs": math.ceil(PLACES / config.num_players)}
    flags = dataclasses.replace(run.args, **flags)
    state = run.script.TrainState(flags, 0, torch.device(flags.device))
    runs.load_params(state.networks["world"], run.networks["world"])
    return state


def world_rows(args: Args, run: Run, table: list[str] | None) -> list[dict]:
    """table: who sits where, None if the run has no policy"""
    config = run.args.config
    ahead = min(AHEAD, config.final_time)
    changes = {"num_steps": STARTS + ahead, "imagination_horizon": ahead, "num_envs": PLACES}
    found = {}
    rounds = ROUNDS
    if table is not None:
        rounds = 1
        here = seat_all(run, table, args, **changes)
        found["these seats"] = exact_boards(run, here, here.games)
    boards = {"rule-based": config}
    if args.height or args.width:
        size = {"height": args.height or config.height, "width": args.width or config.width}
        other = dataclasses.replace(config, **size)
        boards[f"rule-based, {other.height}x{other.width}"] = other
    for about, config in boards.items():
        state = world_state(run, args, config, **changes)
        found[about] = exact_boards(run, state, state.watched, rounds)
    seeds = run.args.num_seeds
    rows = []
    for about, (right, counts) in found.items():
        right = right.unflatten(1, (seeds, -1)).sum(2)  # [2, S, steps]
        counts = counts.unflatten(0, (seeds, -1)).sum(1)
        shares = right / counts  # NaN where no stretch is so long
        for (name, share), number, k in itertools.product(
            zip(("exact", "payoff"), shares, strict=True), range(seeds), range(ahead)
        ):
            seed = run.args.seed + number
            rows.append(row_of(f"{name} after {k + 1}", about, seed, share[number, k], counts[number, k]))
    return rows


# ---- Reporting
def by_about(rows: list[dict], measures: list[str]) -> dict[str, dict[str, list[dict]]]:
    """about -> measure -> its rows, of all seeds"""
    found = {}
    for row in rows:
        if row["measure"] in measures:
            found.setdefault(row["about"], {}).setdefault(row["measure"], []).append(row)
    return found


def text_of(rows: list[dict]) -> str:
    """The mean over seeds, and its interval; of one seed over games"""
    mean, half = runs.interval([row["value"] for row in rows])
    half = rows[0]["half_width_95"] if len(rows) == 1 else half
    return "-" if math.isnan(mean) else runs.mean_text(mean, half)


def print_table(title: str, rows: list[dict], measures: list[str], headings=None) -> None:
    """A line for each thing that the measures are about"""
    lines = by_about(rows, measures)
    if not lines:
        return
    print(title.ljust(22) + "".join(name.rjust(20) for name in headings or measures))
    for about, found in lines.items():
        cells = [text_of(found[name]) if name in found else "" for name in measures]
        print(about.ljust(22) + "".join(cell.rjust(20) for cell in cells))
    print()


def mean_of(rows: list[dict], about: str, measure: str) -> float:
    values = [row["value"] for row in rows if (row["about"], row["measure"]) == (about, measure)]
    return float(np.mean(values)) if values else math.nan


NLL = ["NLL", "NLL its own", "NLL Bayes"]
TOP1 = ["top-1", "top-1 its own", "top-1 Bayes"]
RECALL = [f"recall of {name}" for name in game.ACTION_NAMES]


def report(rows: list[dict]) -> None:
    print_table("seat", rows, ["return", "stag", "hare"])
    print_table("MOA about", rows, [*NLL, *TOP1])
    print_table("recall", rows, RECALL, game.ACTION_NAMES)
    print_table("world model", rows, [f"exact after {k}" for k in SHOWN_AHEAD])
    print_table("its payoffs", rows, [f"payoff after {k}" for k in SHOWN_AHEAD])
    totals = [row for row in rows if row["about"] == "all steps"]
    print_table("probe of subgoals", totals, ["probe", "most frequent prey"])


def draw(path: Path, rows: list[dict], title: str) -> None:
    """A panel for each part that the run has"""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"return": draw_returns}
    measures = {row["measure"] for row in rows}
    panels |= {"NLL": draw_nll, "recall of stay": draw_recall} if "NLL" in measures else {}
    panels |= {"exact after 1": draw_exact, "probe": draw_probe}
    panels = [panel for measure, panel in panels.items() if measure in measures]
    size = (5 * len(panels), 4)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], panels, strict=True):
        panel(axis, rows)
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)
    print(f"wrote {path}")


def draw_bars(axis, rows: list[dict], measures: list[str], labels=None) -> None:
    """A group of bars for each thing, one bar for each measure"""
    lines = by_about(rows, measures)
    place = np.arange(len(lines))
    for number, measure in enumerate(measures):
        found = [runs.interval([row["value"] for row in line[measure]]) for line in lines.values()]
        means, halves = zip(*found, strict=True)
        wide = 0.8 / len(measures)
        left = place + wide * (number - (len(measures) - 1) / 2)
        axis.bar(left, means, wide, yerr=np.nan_to_num(halves), label=labels and labels[number])
    axis.set_xticks(place, list(lines), rotation=30, ha="right")


def draw_returns(axis, rows: list[dict]) -> None:
    draw_bars(axis, rows, ["return"])
    axis.set_title("return")


def draw_nll(axis, rows: list[dict]) -> None:
    draw_bars(axis, rows, NLL, ["MOA", "its own probabilities", "Bayes' rule"])
    axis.set_title("NLL of co-players' actions, nats")
    axis.legend()


def draw_recall(axis, rows: list[dict]) -> None:
    """MOA's, and below it that of the co-player's own probabilities"""
    kinds = list(by_about(rows, RECALL))
    shares, names = [], []
    for kind, end in itertools.product(kinds, ("", " its own")):
        shares.append([mean_of(rows, kind, name + end) for name in RECALL])
        names.append(kind + end.replace(" its", ", its"))
    axis.imshow(shares, vmin=0, vmax=1, cmap="Blues", alpha=0.6, aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        if not math.isnan(share):
            axis.text(column, row, f"{share:.2f}", ha="center", va="center")
    axis.set_xticks(range(game.NUM_ACTIONS), game.ACTION_NAMES, rotation=30, ha="right")
    axis.set_yticks(range(len(names)), names)
    axis.set_title("MOA: how often an action was foreseen")


def draw_exact(axis, rows: list[dict]) -> None:
    exact = [row for row in rows if row["measure"].startswith("exact after")]
    for about in dict.fromkeys(row["about"] for row in exact):
        of_about = by_about([row for row in exact if row["about"] == about], [row["measure"] for row in exact])
        means = [np.mean([row["value"] for row in found]) for found in of_about[about].values()]
        axis.plot(range(1, len(means) + 1), means, "o-", label=about)
    axis.set(title="world model: share of exact boards", xlabel="steps ahead", ylim=(0, 1.05))
    axis.legend()


def draw_probe(axis, rows: list[dict]) -> None:
    steps = sorted({int(row["about"][5:]) for row in rows if row["about"].startswith("step ")})
    axis.plot(steps, [mean_of(rows, f"step {step}", "probe") for step in steps], label="probe")
    most = mean_of(rows, "all steps", "most frequent prey")
    axis.axhline(most, ls="--", color="grey", label="always the most frequent prey")
    axis.set(title="does a subgoal tell the prey?", xlabel="step of the game", ylim=(0, 1.05))
    axis.legend()


@torch.no_grad()
def main(args: Args) -> list[dict]:
    path = runs.find_checkpoint(args.run)
    run = load_world_model(args, path)
    table = None
    if run is None:
        run = runs.load_run(args.run, args.script, args.device)
        table = runs.seats_of(run, args.seats)
    config = run.args.config
    who = "-".join(table or ["world-model"])
    title = run.folder / f"evaluation_{who}"
    first_seed = run.args.seed
    print(f"{config.setting}, {run.folder}, frozen; {run.args.num_seeds} seed(s)")
    rows = []
    frames = []
    if table is not None:
        played = play(args, run, table)
        frames = played.frames
        rows += game_rows(played, table, first_seed)
        if played.about:
            rows += moa_rows(played.about, played.names, first_seed)
            if played.about["goal"].shape[1]:
                rows += probe_rows(played.about, first_seed)
    if "world" in run.networks:
        rows += world_rows(args, run, table)
    report(rows)
    runs.write_csv(Path(f"{title}.csv"), rows)
    draw(Path(f"{title}.png"), rows, f"{run.folder.name}, {who}")
    if frames:
        game.write_gif(f"{title}.gif", frames)
        print(f"wrote {title}.gif")
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Args))
