"""See what a hunter thinks: games of a run in the browser, and in each step what every learner believes.

    python evaluation/inspector.py runs/RUN                          # writes inspect_<seats>.html beside it
    python evaluation/inspector.py runs/RUN --games 8 --seed 1 --out page.html
    python evaluation/inspector.py runs/RUN --seats learner,nearest_stag,nearest_hare,random
    python evaluation/inspector.py runs/RUN --script my_copy.py      # an edited copy of the script

The learners of the first seed play, and the script's own functions say what each believed before each
step. The answers go into `inspector.html`; `docs/inspector.md` explains the page.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation import runs
from evaluation.evaluate import PREY, kind_names, note_steps
from evaluation.runs import Run, RunArgs

import numpy as np
import torch
import tyro
from torch.nn import functional as F

TEMPLATE = Path(__file__).resolve().parent / "inspector.html"
ABOUT_OTHERS = ("moa", "goal", "without", "memory")  # one entry for each co-player
LOOK_AHEAD = "what it hunts first"  # a goal of no categories of its own: read from the samples
GOAL_DRAWS = 16  # subgoals over which MOA's prediction is averaged
ROWS = 8192  # imagined at a time
CELLS = 3_500_000  # imagined in all, if nobody says how many samples
DIGITS = 5  # of the numbers in the page


@dataclasses.dataclass
class Args(RunArgs):
    seats: str | None = None  # who sits where: learner, mixed, players, strangers (None: as in training)
    games: int = 8  # games to show
    places: int = 2  # where: at each one game follows the other, and nobody knows each other at first
    steps_ahead: int = 4  # how far the models are rolled forward from each step
    samples: int | None = None  # how often (None: 128 on a GPU, on a CPU 16 to 128)
    out: str | None = None  # the file (None: inspect_<seats>.html in the run's folder)


# ---- Games
def situation_of(state) -> dict:
    """What the script's perceive reads, [M, E, ...]"""
    games, env = state.games, state.env
    return {
        "board": games.seats.to_learners(games.boards(env.state)),
        "clock": games.seats.per_learner(env.clock(env.state)),
        "last_joint": games.last_joint.clone(),
        "first_hunt": games.seats.per_learner(env.state.first_hunt),
        "history": games.history.clone(),
    }


def note_plans(script) -> list:
    """The list to which each search adds what it found"""
    plans = []
    search = getattr(script, "plan_actions", None)
    if search is not None:

        def noted(*given):
            plans.append(search(*given))
            return plans[-1]

        script.plan_actions = noted
    return plans


@torch.no_grad()
def record_games(run: Run, state, wanted: list[int]) -> tuple[dict, dict, dict]:
    """Plays until so many games have ended at each place. -> situations and searches [M, T, E, ...];
    what everybody can see before each step, and after the last of a game [T, E, ...] by seat"""
    env, seats = state.env, state.games.seats
    last = note_steps(env, seats)
    plans = note_plans(run.script)
    wanted = torch.tensor(wanted, device=env.device)
    ended = torch.zeros_like(wanted)
    situations, searched, seen = [], [], []
    while (ended < wanted).any():
        situations.append(situation_of(state))
        run.script.rollout(state, state.games)  # of one step
        probs = last["probs"]
        if plans:
            plan, _ = plans.pop()
            probs = seats.to_seats(plan["played"], probs)
            figures = [plan[f"search/{name}"] for name in ("gain", "kl", "depth")]
            found = {name: plan[name] for name in ("visits", "q", "played")}
            searched.append(found | {"search": torch.stack(figures, -1)})
        before = last["before"]._asdict() | {"returns": last["returns"]}
        after = env.final_state._asdict() | {"returns": env.final_return}
        after = {f"final_{name}": x.clone() for name, x in after.items()}
        played = {name: last[name].clone() for name in ("kinds", "actions", "done")}
        seen.append({**before, **after, **played, "probs": probs, "shown": ended < wanted})
        ended += last["done"]
    return stack(situations, 1), stack(searched, 1), stack(seen, 0)


def stack(steps: list[dict], dim: int) -> dict:
    return {name: torch.stack([step[name] for step in steps], dim) for name in (steps[0] if steps else ())}


# ---- Beliefs
def forget_earlier_games(situation: dict) -> dict:
    """The same, as if this were the first game together"""
    now, before = situation["history"].chunk(2, -1)
    return situation | {"history": torch.cat([now, torch.zeros_like(before)], -1)}


def expected_actions(run: Run, state, mind: dict) -> torch.Tensor:
    """MOA's probabilities [M, n, K, 7], averaged over the co-players' subgoals: over draws of them, the
    same in all rows, or over the categories"""
    posterior = mind["posterior"]  # [M, n * K, _]
    if state.args.goal_kind == "discrete":
        noise = 1e4 * torch.eye(state.args.goal_dim, device=posterior.device)  # each category in turn
        weights = posterior.softmax(-1).unflatten(1, mind["history"].shape[1:3]).unbind(-1)
    else:
        torch.manual_seed(0)
        noise = run.script.goal_noise(state.args, posterior[:1, :1].expand(1, GOAL_DRAWS, -1))[0]
        weights = torch.full((GOAL_DRAWS,), 1 / GOAL_DRAWS, device=posterior.device)
    expected = 0.0
    for draw, weight in zip(noise, weights, strict=True):
        draws = draw.expand(*posterior.shape[:2], -1)
        expected += weight[..., None] * run.script.predict_actions(state, mind, draws)
    return expected


def goal_names(args) -> tuple[str, list[str]]:
    """What the page shows of a co-player's goal, and the categories"""
    if args.subgoals == "hop":
        return "Bayes' rule", ["stag", "hare"]
    if args.goal_kind == "discrete":
        return "categories of g", [f"goal {k}" for k in range(args.goal_dim)]
    return LOOK_AHEAD, list(PREY)


def read_minds(run: Run, state, situations: dict) -> dict:
    """What each learner thought before each step, each [M, n, ...]. `goal`: where goals have categories
    of their own (else see look_ahead); `without`: the same if nothing had been carried over from
    earlier games; `memory`: how much was"""
    mind = run.script.decide(state, run.script.perceive(state, situations))
    found = {"policy": mind["log_probs"].exp(), "value": mind["value"]}
    if not state.args.has_models:
        return found
    found["moa"] = expected_actions(run, state, mind)
    before = situations["history"].chunk(2, -1)[1]
    found["memory"] = 0.5 + before if state.args.subgoals == "hop" else before[..., :1]
    if goal_names(state.args)[0] != LOOK_AHEAD:
        stranger = run.script.perceive(state, forget_earlier_games(situations))
        for name, posterior in {"goal": mind["posterior"], "without": stranger["posterior"]}.items():
            found[name] = posterior.softmax(-1).unflatten(1, before.shape[1:3])
    return found


# ---- The next steps
def rules_step(state, situation: dict, joint) -> dict:
    """As the script's imagined_step, by the game's own rules"""
    env, config = state.env, state.args.config
    gone = config.num_cells
    board = situation["board"].flatten(0, 1).int()
    sizes = config.num_players, config.num_prey, config.num_wall_cells
    players, prey, walls = board.split(sizes, 1)
    time = (situation["clock"].flatten() * config.final_time).round().int()
    before = game.State(
        position=players.clamp(max=gone - 1),
        present=players < gone,
        prey_position=prey.clamp(max=gone - 1),
        prey_alive=prey < gone,
        walls=walls.expand(-1, gone).to(torch.uint8),
        time=time,
        first_hunt=situation["first_hunt"].flatten().int(),
    )
    after, _, _, _ = env.transition(before, joint.flatten(0, 1))
    shape = situation["clock"].shape
    return {
        "board": state.games.boards(after)[:, 0].view_as(situation["board"]),
        "clock": env.clock(after).view(shape),
        "last_joint": joint,
        "first_hunt": after.first_hunt.view(shape),
    }


def game_over(config, situation: dict) -> torch.Tensor:
    """bool [M, n], by the clock"""
    time = (situation["clock"] * config.final_time).round()
    over = time >= config.final_time
    limit = config.steps_after_first_hunt
    if limit is not None:
        first_hunt = situation["first_hunt"]
        over |= (first_hunt >= 0) & (time - first_hunt >= limit)
    return over


def roll_forward(run: Run, state, start: dict, samples: int, steps: int):
    """From situations [M, n, ...], each `samples` times: yields, step by step, the situations before
    it [M, n * samples, ...], what everybody does [M, n * samples, N], the boards after it. A sample
    draws the co-players' subgoals once and keeps them, as a search does"""
    script = run.script
    situation = {name: x.repeat_interleave(samples, 1) for name, x in start.items()}
    mind = root = script.perceive(state, situation)
    noise = script.goal_noise(state.args, root["posterior"])
    for _ in range(steps):
        mind = script.decide(state, mind)
        others = script.predict_actions(state, mind, noise)
        probs = torch.cat([mind["log_probs"].exp()[:, :, None], others], 2)
        joint = game.sample(probs).byte()
        if "world" in state.networks:
            new = script.imagined_step(state, situation, joint)
        else:
            new = rules_step(state, situation, joint)
        yield situation, joint, new["board"]
        situation = {name: new.get(name, situation[name]) for name in situation}
        mind = script.perceive(state, situation) | {"posterior": root["posterior"]}
        if state.args.subgoals == "inferred":
            mind["goals"] = root["goals"]


def choose_samples(env, num_starts: int, num_steps: int) -> int:
    """128 on a GPU; else as many as a few seconds allow, a power of two"""
    if env.device.type == "cuda":
        return 128
    affordable = CELLS // (num_starts * num_steps * (env.config.num_cells + 32))
    power_of_two = 1 << max(1, affordable).bit_length() - 1
    return min(128, max(16, power_of_two))


def look_ahead(run: Run, state, start: dict, samples: int, steps_ahead: int, hunt_steps: int):
    """MOA and the world model (if there is none: the game's rules) rolled forward from situations
    [M, n, ...]. -> [M, n, steps, N, H*W + 1] samples with a player on a cell (the last: gone);
    [M, n, K, 3] share of samples in which a co-player first hunts nothing, a stag, a hare"""
    config = state.args.config
    players = config.num_players
    cells, shares = [], []
    parts = max(1, start["clock"].numel() * samples // ROWS)
    for number, index in enumerate(torch.arange(start["clock"].shape[1]).tensor_split(parts)):
        torch.manual_seed(number)  # with and without earlier games: the same luck
        part = {name: x[:, index] for name, x in start.items()}
        hunted = 0
        on_cells = []
        steps = max(steps_ahead, hunt_steps)
        for step, (situation, joint, board) in enumerate(roll_forward(run, state, part, samples, steps)):
            if step < steps_ahead:
                seen = F.one_hot(board[..., :players].long(), config.num_cells + 1)
                on_cells.append(seen.unflatten(1, (-1, samples)).sum(2, dtype=torch.int32))
            present = situation["board"][..., 1:players] < config.num_cells
            may_hunt = present & ~game_over(config, situation)[..., None]
            hunt = (joint[..., 1:].long() - game.STAY).clamp(min=0) * may_hunt
            if step < hunt_steps:
                hunted = torch.where(torch.as_tensor(hunted) > 0, hunted, hunt)
        if on_cells:
            cells.append(torch.stack(on_cells, 2))
        if hunt_steps:
            by_sample = F.one_hot(hunted, len(PREY)).unflatten(1, (-1, samples))
            shares.append(by_sample.float().mean(2))
    return cells and torch.cat(cells, 1), shares and torch.cat(shares, 1)


# ---- The page
def heat(counts: np.ndarray) -> np.ndarray:
    """[H*W + 1] -> cell, count, cell, count, ... where there are any"""
    cells = np.flatnonzero(counts)
    return np.stack([cells, counts[cells]], 1).flatten()


def mind_data(thoughts: dict[str, np.ndarray], seat: int, position: np.ndarray) -> dict[str, list]:
    """What the learner in `seat` thought in a game, [T, ...] each, step by step. None where it, or the
    co-player that it is about, was not on the board"""
    ego = (seat + np.arange(position.shape[1])) % position.shape[1]  # ego order -> seat
    mind = {name: [None] * len(x) for name, x in thoughts.items()}
    for t in np.flatnonzero(position[:-1, seat] >= 0):
        for name, x in thoughts.items():
            thought = x[t]
            if name == "ahead":  # [steps, N, H*W + 1]
                of_seat = {j: [heat(counts) for counts in thought[:, k]] for k, j in enumerate(ego)}
                thought = [of_seat[j] for j in sorted(of_seat)]
            elif name in ABOUT_OTHERS:
                there = {j: thought[k] for k, j in enumerate(ego[1:]) if position[t, j] >= 0}
                thought = [there.get(j) for j in range(len(ego))]
            mind[name][t] = thought
    return mind


def game_data(names: list[str], seen: dict[str, np.ndarray]) -> dict:
    """A whole game as everybody can see it; seen [T, ...]: before each step, and `final_`: after it"""
    shown = {}
    for name, x in seen.items():
        if f"final_{name}" in seen:
            shown[name] = np.concatenate([x, seen[f"final_{name}"][-1:]])
    present = shown["present"]
    taken = [None] * present.shape[1]
    for step, seat in np.argwhere(present[:-1] & ~present[1:]).tolist():
        prey = "stag" if seen["actions"][step, seat] == game.HUNT_STAG else "hare"
        taken[seat] = {"step": step, "prey": prey}
    return {
        "names": names,
        "taken": taken,
        "prey": shown["prey_position"][0],
        "walls": np.flatnonzero(shown["walls"][0]),
        "actions": seen["actions"],
        "position": np.where(present, shown["position"], -1),
        "alive": shown["prey_alive"].astype(int),
        "time": shown["time"],
        "returns": shown["returns"],
        "probs": seen["probs"],
    }


def plain(x):
    """Arrays as nested lists; numbers with as few digits as the page needs"""
    if isinstance(x, np.ndarray | np.generic):
        x = x.tolist()
    if isinstance(x, dict):
        return {name: plain(entry) for name, entry in x.items()}
    if isinstance(x, list | tuple):
        return [plain(entry) for entry in x]
    if isinstance(x, float):
        x = round(x, DIGITS)
        return int(x) if x == int(x) else x
    return x


@torch.no_grad()
def inspect_run(args: Args, run: Run, table: list[str]) -> dict:
    """Plays, and asks. -> all that the page shows"""
    places = min(args.places, args.games)
    wanted = [math.ceil((args.games - place) / places) for place in range(places)]
    seats = [seat for seat, name in enumerate(table) if name == "learner"]
    numbers = [runs.learner_number(run, 0, seat) for seat in seats]
    changes = {"num_envs": places, "num_steps": 1, "seed": args.seed}
    state = runs.seat_learners(run, [table], numbers, **changes)
    config = run.args.config
    situations, thoughts, seen = record_games(run, state, wanted)
    shape = situations["clock"].shape[1:]  # [T, E]
    flat = {name: x.flatten(1, 2) for name, x in situations.items()}
    found = read_minds(run, state, flat)
    data = page_settings(run, table)
    kind, categories = goal_names(state.args)
    hunt_steps = 0
    if kind == LOOK_AHEAD:  # the time to walk across the board
        hunt_steps = min(config.height + config.width, config.final_time)
    if state.args.has_models:
        data["carried"] = state.args.history_decay
        data["goal"] = {"kind": kind, "names": categories, "steps": hunt_steps}
        shown = seen["shown"].flatten().nonzero()[:, 0]
        start = {name: x[:, shown] for name, x in flat.items()}
        steps = max(args.steps_ahead, hunt_steps)
        samples = args.samples or choose_samples(state.env, len(seats) * len(shown), steps)
        parts = {}
        parts["ahead"], parts["goal"] = look_ahead(run, state, start, samples, args.steps_ahead, hunt_steps)
        if hunt_steps and data["carried"] > 0:
            start = forget_earlier_games(start)
            parts["without"] = look_ahead(run, state, start, samples, 0, hunt_steps)[1]
        for name, x in parts.items():
            if len(x):
                found[name] = x.new_zeros(*flat["clock"].shape, *x.shape[2:])
                found[name][:, shown] = x
        model = "its world model" if "world" in state.networks else "the game's own rules"
        data["ahead"] = {"steps": args.steps_ahead, "samples": samples, "model": model}
    thoughts |= {name: x.unflatten(1, shape) for name, x in found.items()}
    thoughts = {name: x.cpu().numpy() for name, x in thoughts.items()}
    seen = {name: x.cpu().numpy() for name, x in seen.items()}
    for place, number in enumerate(wanted):
        ends = np.flatnonzero(seen["done"][:, place])[:number]
        for first, last in zip([0, *ends[:-1] + 1], ends, strict=True):
            part = {name: x[first : last + 1, place] for name, x in seen.items()}
            names = kind_names(state.games.seats, part["kinds"][0])
            shown = game_data(names, part) | {"place": place, "minds": {}}
            for m, seat in enumerate(seats):
                own = {name: x[m, first : last + 1, place] for name, x in thoughts.items()}
                shown["minds"][seat] = mind_data(own, seat, shown["position"])
            data["games"].append(shown)
    return plain(data)


def page_settings(run: Run, table: list[str]) -> dict:
    """What the page says about the run, before any game"""
    args = run.args
    config = args.config
    search = None
    if getattr(args, "planner", "none") != "none":
        simulations = game.NUM_ACTIONS if args.planner == "one-step" else args.num_simulations
        search = {"simulations": simulations, "trees": args.num_trees}
    return {
        "run": run.folder.name,
        "script": Path(run.script.__file__).name,
        "setting": config.setting,
        "method": args.method,
        "seats": table,
        "gamma": args.gamma,
        "height": config.height,
        "width": config.width,
        "stags": config.num_stags,
        "final_time": config.final_time,
        "digits": DIGITS,
        "actions": game.ACTION_NAMES,
        "colours": game.COLOURS,
        "sprites": {"stag": game.STAG.split(), "hare": game.HARE.split()},
        "ink": game.INK,
        "goal": None,
        "carried": 0,
        "search": search,
        "ahead": None,
        "games": [],
    }


def write_page(path: Path, data: dict) -> None:
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    path.write_text(TEMPLATE.read_text().replace("{{DATA}}", text))
    print(f"wrote {path}, {path.stat().st_size / 1e6:.2f} MB; open it in a browser")


def main(args: Args) -> None:
    run = runs.load_run(args.run, args.script, args.device)
    table = runs.seats_of(run, args.seats)
    out = Path(args.out or run.folder / f"inspect_{'-'.join(table)}.html")
    write_page(out, inspect_run(args, run, table))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Args))
