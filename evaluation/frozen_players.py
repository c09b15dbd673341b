"""Frozen learners of other runs as co-players: `adapt.py --sets learned` seats them.

A group is one run's learners in some seats of an env's games, with two methods, called in turn:

    probs(state) -> [B, N, 7]    what they do next; only the seats of the group count
    update(actions, done)        actions [B, N], done [B]: what they remember goes on

Nothing in them waits for the host, and memory is overwritten in place: a CUDA graph holds both.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation import gru, runs
from evaluation.runs import Run

import torch

# ---- Which runs


def load_others(texts: tuple[str, ...], device: str, config: game.StagHuntConfig) -> dict[str, Run]:
    """--others, each PATH or NAME=PATH -> name -> run"""
    others = {}
    tf32 = torch.backends.cuda.matmul.allow_tf32
    for text in texts:
        name, path = split_name(text)
        checkpoint = game.find_checkpoint(path, "--others")
        if gru.is_gru(checkpoint):
            run = gru.load_run([checkpoint], device)
            method = "gru"
        else:
            run = runs.load_run(runs.RunFlags(path=str(checkpoint), device=device), [])
            method = run.args.method
        check_board(text, run.args.config, config)
        if name is None:
            name = f"{method} seed {run.args.seed}"
        twice = f"--others: two runs are called {name}: name them, --others NAME=PATH"
        game.refuse(name in others, twice)
        others[name] = run
    torch.backends.cuda.matmul.allow_tf32 = tf32  # as the learner that adapts has it
    return others


def split_name(text: str) -> tuple[str | None, str]:
    """NAME=PATH -> name, path; PATH (run folders may have a = in their name) -> None, path"""
    name, equals, path = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        return None, text
    taken = ("learner", "mixed", *game.STRANGERS, *game.PLAYER_PROBS)
    game.refuse(not name.strip(), f"--others {text}: the name is missing before =")
    already = f"--others {text}: {name} is what seats hold already, take another name"
    game.refuse(name in taken, already)
    return name, path


def check_board(text: str, config: game.StagHuntConfig, wanted: game.StagHuntConfig) -> None:
    """Refuses a run that was trained on another game"""
    differences = []
    for name, value in vars(wanted).items():
        other = getattr(config, name)
        if other != value:
            differences.append(f"{game.flag(name)} {other} instead of {value}")
    differ = ", ".join(differences)
    another = f"--others {text}: it was trained on another game, with {differ}"
    game.refuse(bool(differences), another)


def sets_of(names: list[str]) -> dict[str, tuple[str, ...]]:
    """Three of each run, and mixtures of neighbours -> the co-players"""
    sets = {f"3 of {name}": (name,) * 3 for name in names}
    if len(names) == 2:
        first, second = names
        sets[f"2 of {first} + {second}"] = (first, first, second)
        sets[f"{first} + 2 of {second}"] = (first, second, second)
    mixtures = len(names) if len(names) > 3 else len(names) // 3
    for start in range(mixtures):
        neighbours = tuple((names + names)[start : start + 3])
        sets[" + ".join(neighbours)] = neighbours
    return sets


# ---- Who sits where


class Places(NamedTuple):
    """Where M learners of one run sit, n places each: who has fewer has its first place again"""

    learners: list[int]  # [M] their numbers in the checkpoint
    game: torch.Tensor  # int64 [M, n]
    seat: torch.Tensor  # int64 [M, n]
    row: torch.Tensor  # int64 [B, N] which of the M * n rows sits there
    filled: torch.Tensor  # bool [B, N] does one of them sit there?


def learner_at(run: Run, seat: int, number: int) -> int:
    """The learner that takes this seat: the one that learned in it, else the run's first. Seeds
    take turns"""
    saved = run.checkpoint["args"]
    table = game.seats_table(saved["seats"], run.args.config.num_players)
    trained = runs.learner_seats(table)
    learned_in = seat if seat in trained else trained[0]
    return runs.learner_index(run.checkpoint, number % run.num_seeds, learned_in)


def find_places(run: Run, name: str, tables: list[list[str]], numbers: list[int], device) -> Places:
    """tables, numbers [B]: who sits in each game, and its number in the turns of the seeds"""
    places = {}
    for number, (table, turn) in enumerate(zip(tables, numbers, strict=True)):
        for seat, sitting in enumerate(table):
            if sitting == name:
                learner = learner_at(run, seat, turn)
                places.setdefault(learner, []).append((number, seat))
    most = max(len(x) for x in places.values())
    row = torch.zeros(len(tables), len(tables[0]), dtype=torch.int64)
    filled = torch.zeros_like(row, dtype=torch.bool)
    padded = []
    for m, own_places in enumerate(places.values()):
        games, seats = torch.tensor(own_places).unbind(1)
        row[games, seats] = m * most + torch.arange(len(own_places))
        filled[games, seats] = True
        padded.append(own_places + own_places[:1] * (most - len(own_places)))
    game_number, seat_number = torch.tensor(padded, device=device).unbind(2)
    return Places(list(places), game_number, seat_number, row.to(device), filled.to(device))


class FrozenPlayers:
    """A group of learners of hopplus_ppo.py or hopplus_mcts.py; they act by their policy"""

    def __init__(self, run: Run, env: game.StagHuntEnv, places: Places):
        changes = {"imagination": False, "share_parameters": False, "num_envs": 1}
        if run.planner != "none":
            changes["planner"] = "none"
        players = env.config.num_players
        self.args = dataclasses.replace(run.args, **runs.FROZEN, **changes)
        self.script = run.script
        self.env = env
        self.places = places
        self.networks = run.script.make_networks(self.args, places.learners, env.device)
        runs.load_agents(run, self.networks, places.learners)
        example = run.script.Games(self.args, [["learner"] * players], env.device)
        rows = places.game.shape
        self.last_joint = torch.full((*rows, players), game.STAY, device=env.device)
        self.history = torch.zeros(*rows, *example.history.shape[2:], device=env.device)
        self.board = None
        self.belief = None

    def to_places(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, ...] by seat -> [M, n, ...]"""
        return x[self.places.game, self.places.seat]

    @torch.no_grad()
    def probs(self, state: game.State) -> torch.Tensor:
        env = self.env
        number = self.places.game
        self.board = self.to_places(env.cells(state))
        self.belief, output = self.script.perceive(
            self.args,
            env,
            self.networks,
            self.script.infer_opponents,
            self.board,
            state.walls[number, : env.config.num_wall_cells],
            env.clock(state)[number],
            self.last_joint,
            self.history,
        )
        probs = output["log_probs"].exp().flatten(0, 1)
        return probs[self.places.row]

    @torch.no_grad()
    def update(self, actions: torch.Tensor, done: torch.Tensor) -> None:
        joint = self.to_places(self.env.seats_to_ego(actions))
        ended = done[self.places.game]
        if self.networks.inference is not None:
            history = self.count_hunts(joint, done)
            models = self.args, self.env, self.networks, self.belief
            self.history.copy_(self.script.update_history(*models, joint, history, ended))
        self.last_joint.copy_(joint.masked_fill(ended[..., None], game.STAY))

    def count_hunts(self, joint, done):
        """The history [M, n, ...]. HOP, in hopplus_mcts.py alone, counts in it who took which prey"""
        if self.args.subgoals != "hop":
            return self.history
        env = self.env
        cells = torch.where(done[:, None, None], env.cells(env.final_state), env.cells(env.state))
        exited = self.script.exited(env.config, self.board, self.to_places(cells))
        count = vars(self.script)["count_hunts"]
        return count(self.args, joint, exited, self.history)


class LearnedSeats(game.Seats):
    """The same seats, some of them filled by groups of learned players; the exact posterior takes them
    for whom they resemble in the population"""

    def __init__(self, seats: game.Seats, groups: list, filled: list):
        """groups, and the seats that each fills, bool [B, N]"""
        vars(self).update(vars(seats))
        self.groups = groups
        self.filled = filled

    def action_probs(self, state, learner_probs=None):
        probs = super().action_probs(state, learner_probs)
        for group, filled in zip(self.groups, self.filled, strict=True):
            probs = torch.where(filled[..., None], group.probs(state), probs)
        self._probs = probs
        return probs

    def update(self, actions, present_before, done):
        super().update(actions, present_before, done)
        for group in self.groups:
            group.update(actions, done)


def stand_ins(others: dict[str, Run], tables: list[list[str]]) -> list[list[str]]:
    """The tables with a random player wherever a learned one will sit"""
    return [["random" if name in others else name for name in table] for table in tables]


def seat_others(others: dict[str, Run], seats: game.Seats, tables, numbers):
    """seats: of stand_ins(others, tables) -> with the learned players. numbers [B]: of each game in
    the turns of the seeds"""
    env = seats.env
    by_game = [table for table in tables for _ in range(seats.num_envs)]
    groups = []
    filled = []
    for name, run in others.items():
        if not any(name in table for table in tables):
            continue
        if run.script is gru.ppo_gru:
            sits = [[sitting == name for sitting in table] for table in by_game]
            filled.append(torch.tensor(sits, device=env.device))
            groups.append(gru.GruPlayers(run, env, filled[-1]))
            continue
        places = find_places(run, name, by_game, numbers, env.device)
        groups.append(FrozenPlayers(run, env, places))
        filled.append(places.filled)
    if not groups:
        return seats
    return LearnedSeats(seats, groups, filled)
