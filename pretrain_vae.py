"""Pretrains the subgoal VAE, the recurrent subgoal inference and the model of the others' actions (MOA) on games of
rule-based players, and measures them like a classifier.

    python pretrain_vae.py                                            # 4x4, continuous subgoals, both losses
    python pretrain_vae.py --loss recon                               # subgoals shaped by reconstruction alone
    python pretrain_vae.py --goal-kind discrete
    python pretrain_vae.py --height 8 --width 8 --players nearest_stag nearest_hare --num-samples 107010 --num-seeds 5
    python pretrain_vae.py --resume runs/RUN/checkpoint.pt

A sample is one step of one player j that was on the board: (its view of the game so far) -> its action. Two predictors are
trained side by side: one infers the subgoal g from the current state alone, one from the whole game so far. Beside them stand
two exact ceilings, made from the players' known probabilities: what can be predicted if j's kind is known, and if it has to be
inferred from the same history by Bayes' rule. `docs/pretraining.md` explains every figure this script prints.
"""

import contextlib
import csv
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from stag_hunt_env import (
    ACTION_NAMES,
    ALL_SEATS,
    NUM_ACTIONS,
    PLAYER_PROBS,
    STAY,
    StagHuntConfig,
    StagHuntEnv,
    StagHuntFlags,
    State,
    check_players,
    command_line,
    resolve_device,
    sample,
    seat_probs,
)

TAGS = {  # the four predictors, and their names in TensorBoard and metrics.jsonl
    "state only": "moa_state",
    "with history": "moa",
    "ceiling: Bayes from history": "ceiling/Bayes from history",
    "ceiling: kind known": "ceiling/kind known",
}
PREDICTORS = tuple(TAGS)
PREY = ("nothing", "stag", "hare")


@dataclasses.dataclass
class Args:
    exp_name: str = "pretrain_vae"
    """first part of the run's name"""
    seed: int = 1
    """seed of the first experiment; the others count up from it"""
    num_seeds: int = 1
    """experiments side by side, each with its own games (unless --data holds one set), weights and TensorBoard run; they
    share the draws of minibatches and noise, so a seed's numbers depend on the company"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    run_dir: str = "runs"
    """folder in which the runs' folders are made"""
    players: tuple[str, ...] = ("random", "nearest_stag", "nearest_hare")
    """who plays the games: each seat of each game draws one of these"""
    num_samples: int = 100_000
    """samples to train on"""
    held_out_games: int = 1000
    """further games to measure on"""
    data: str | None = None
    """take the games from this file instead of playing them"""
    save_data: str | None = None
    """write the games to this file"""
    loss: Literal["recon", "moa", "both"] = "both"
    """what shapes the subgoals besides KL: reconstruction of the state, cross-entropy of the action, or both"""
    goal_kind: Literal["continuous", "discrete"] = "continuous"
    """Gaussian subgoals, or categories drawn by straight-through Gumbel-softmax"""
    goal_dim: int = 16
    """D, the size of a continuous subgoal"""
    num_goals: int = 8
    """K, the number of discrete subgoals"""
    temperature: tuple[float, float] = (1.0, 0.3)
    """discrete: Gumbel-softmax temperature at the start and at the end"""
    kl_coef: float = 1e-4
    """a, the weight of the KL terms"""
    hidden: int = 64
    """width of the hidden layers"""
    epochs: int = 15
    """passes over the samples"""
    batch_size: int = 128
    """players' games per update and experiment"""
    learning_rate: float = 3e-3
    """Adam's step size at the start; falls to 0 along a cosine"""
    max_grad_norm: float = 1.0
    """clip each experiment's gradient to this norm"""
    augment: bool = True
    """show each game in a random one of the board's symmetries (8 if it is square, else 4)"""
    resume: str | None = None
    """continue the run of this checkpoint, bit for bit, on the same kind of device; all other flags come from it"""
    config: StagHuntFlags = dataclasses.field(default_factory=StagHuntFlags)


# ---------------------------------------------------------------------------------------------------------------------
# Networks. M models are stored stacked, [M, in, out], and work in one operation.


class StackedLinear(nn.Module):
    def __init__(self, generators: list[torch.Generator], inputs: int, outputs: int, gain: float = 1.0):
        super().__init__()
        bound = gain * math.sqrt(3 / inputs)
        draws = [torch.rand(inputs, outputs, generator=generator) for generator in generators]
        self.weight = nn.Parameter((2 * torch.stack(draws) - 1) * bound)  # [M, in, out]
        self.bias = nn.Parameter(torch.zeros(len(generators), 1, outputs))

    def forward(self, x):  # [M, ..., in] -> [M, ..., out], in the precision of x
        rows, weight, bias = x.flatten(1, -2), self.weight.to(x.dtype), self.bias.to(x.dtype)
        result = in_parts(rows, weight, bias) if x.is_cuda else torch.baddbmm(bias, rows, weight)
        return result.view(*x.shape[:-1], -1)


def in_parts(rows, weight, bias):
    """rows [M, n, in] @ weight [M, in, out] + bias, for a GPU: as one long sum for each model, the weights' gradient would
    leave most of it idle"""
    (m, n, _), outputs = rows.shape, weight.shape[2]
    parts = math.gcd(n, 1 << max(1, n // 1024).bit_length() - 1)
    if padding(outputs):
        weight, bias = (F.pad(x, (0, padding(outputs))) for x in (weight, bias))
    if parts > 1:
        rows = rows.reshape(m * parts, n // parts, -1)
        weight, bias = (x.repeat_interleave(parts, 0) for x in (weight, bias))
    return (rows @ weight + bias).view(m, n, -1)[..., :outputs]


def padding(size: int) -> int:
    """How many zeros beside a layer's inputs or outputs: GPUs multiply matrices faster whose rows begin at multiples of 32
    bytes (of 16 in bfloat16)."""
    return -size % 8


class BoardEncoder(nn.Module):
    """A board as a list of things (see `things`) -> features. Each thing is looked up by its kind and its place relative to
    the observer; players add up, and among stags and among hares the largest value wins, so that the nearest can speak."""

    def __init__(self, config: StagHuntConfig, generators: list[torch.Generator], hidden: int):
        super().__init__()
        self.config = config
        n, cells, spots = config.num_players, config.num_cells, (2 * config.height - 1) * (2 * config.width - 1)
        row, column = np.divmod(np.arange(cells), config.width)
        spot = (row - row[:, None] + config.height - 1) * (2 * config.width - 1) + column - column[:, None] + config.width - 1
        self.rows = spots * (n + 2) + cells + 1  # the last row stands for things that are not there
        lookup = np.full((n + 2, cells + 1, cells + 1), self.rows - 1)  # [kind, own cell, its cell] -> row of the table
        lookup[:, :cells, :cells] = spot + spots * np.arange(n + 2)[:, None, None]
        lookup[0, :cells] = spots * (n + 2) + np.arange(cells)[:, None]  # the observer: its place on the board
        kinds = [*range(n), *[n] * config.num_stags, *[n + 1] * config.num_hares]
        self.register_buffer("lookup", torch.tensor(lookup), persistent=False)
        self.register_buffer("kind", torch.tensor(kinds), persistent=False)
        self.register_buffer("first", self.rows * torch.arange(len(generators)).view(-1, 1, 1), persistent=False)
        self.table = nn.Parameter(torch.stack([0.1 * torch.randn(self.rows, hidden, generator=g) for g in generators]))
        self.walls = StackedLinear(generators, cells, hidden) if config.max_wall_pieces else None
        self.mix = StackedLinear(generators, 3 * hidden, hidden, math.sqrt(2))
        self.out = StackedLinear(generators, hidden, hidden, math.sqrt(2))

    def forward(self, things, walls):
        """int64 [M, B, N + P], float [M, B, H*W] -> [M, B, hidden]"""
        config, nothing = self.config, self.table[:, -1:]
        row = self.lookup[self.kind, things[..., :1], things] + self.first[: len(things)]
        table = self.table.flatten(0, 1)

        def look(row, mode):  # [M, B, some] -> [M, B, hidden]
            if row.shape[2] == 0:
                return nothing.expand(-1, row.shape[1], -1)
            fast = row.is_cuda or mode == "sum"
            if fast and not torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the same in one kernel
                return F.embedding_bag(row.flatten(0, 1), table, mode=mode).view(*row.shape[:2], -1)
            vectors = F.embedding(row, table)
            if row.shape[2] == 1:
                return vectors.squeeze(2)
            return vectors.sum(2) if mode == "sum" else vectors.amax(2)

        players, stags, hares = row.split([config.num_players, config.num_stags, config.num_hares], 2)
        seen = [look(players, "sum"), *(torch.maximum(look(prey, "max"), nothing) for prey in (stags, hares))]
        if self.walls is not None:
            seen[0] = seen[0] + self.walls(walls)
        return F.relu(self.out(F.relu(self.mix(torch.cat(seen, 2)))))


class SubgoalPrior(nn.Module):
    """f_psi: a VAE. State -> distribution over subgoals; subgoal -> state."""

    def __init__(self, config, generators, hidden, goal_size, parameters):
        super().__init__()
        self.encoder = BoardEncoder(config, generators, hidden)
        self.head = StackedLinear(generators, hidden, parameters)
        self.decoder = nn.ModuleList([StackedLinear(generators, goal_size, hidden, math.sqrt(2))])
        self.decoder.append(StackedLinear(generators, hidden, math.prod(config.observation_shape)))

    def forward(self, things, walls):
        return self.head(self.encoder(things, walls))

    def reconstruct(self, goal):
        return self.decoder[1](F.relu(self.decoder[0](goal)))


class SubgoalInference(nn.Module):
    """q_phi: a CVAE after OMG. The game up to t - 1, summed up, and the state s_t -> distribution over subgoals; subgoal and
    summary -> state. The summary adds up evidence, h <- decay * h + e(s, joint action), as Bayes adds up log-likelihoods."""

    def __init__(self, config, generators, hidden, goal_size, parameters):
        super().__init__()
        self.encoder = BoardEncoder(config, generators, hidden)
        self.register_buffer("one_hot", torch.eye(NUM_ACTIONS), persistent=False)
        self.event = nn.ModuleList()
        self.event.append(StackedLinear(generators, hidden + NUM_ACTIONS * config.num_players, hidden, math.sqrt(2)))
        self.event.append(StackedLinear(generators, hidden, hidden))
        self.decay = nn.Parameter(torch.full((len(generators), 1, hidden), 4.0))  # sigmoid: 0.98 a step
        self.mix = StackedLinear(generators, 2 * hidden, hidden, math.sqrt(2))
        self.head = StackedLinear(generators, hidden, parameters)
        self.decoder = nn.ModuleList([StackedLinear(generators, goal_size + hidden, hidden, math.sqrt(2))])
        self.decoder.append(StackedLinear(generators, hidden, math.prod(config.observation_shape)))

    def evidence(self, state, joint):
        """features of the encoder [M, n, hidden], joint action [M, n, N] -> what the step adds to the summary"""
        acts = F.embedding(joint, self.one_hot).flatten(2)
        return self.event[1](F.relu(self.event[0](torch.cat([state, acts], 2))))

    def forward(self, state, summary):
        """features of the encoder and summary of what came before, both [M, n, hidden] -> distribution parameters [M, n, _]"""
        return self.head(F.relu(self.mix(torch.cat([state, summary], 2))))

    def reconstruct(self, goal, summary):
        return self.decoder[1](F.relu(self.decoder[0](torch.cat([goal, summary], -1))))


class ActionModel(nn.Module):
    """MOA, pi_omega: state seen from j, clock and subgoal of j -> log-probabilities of j's action."""

    def __init__(self, config, generators, hidden, goal_size):
        super().__init__()
        self.encoder = BoardEncoder(config, generators, hidden)
        self.padding = padding(hidden + 1 + goal_size)
        self.mix = StackedLinear(generators, self.padding + hidden + 1 + goal_size, hidden, math.sqrt(2))
        self.out = StackedLinear(generators, hidden, hidden, math.sqrt(2))
        self.head = StackedLinear(generators, hidden, NUM_ACTIONS, 0.01)

    def forward(self, features, clock, goal, legal):
        """features of the encoder [M, n, hidden], clock [M, n], goal [M, n, _], legal bool [M, n, 7] -> [M, n, 7]"""
        nothing = features.new_zeros(()).expand(*clock.shape, self.padding)
        x = self.head(F.relu(self.out(F.relu(self.mix(torch.cat([nothing, features, clock[..., None], goal], 2))))))
        return x.masked_fill(~legal, -1e9).log_softmax(2)


class Models(nn.Module):
    def __init__(self, args: Args, config: StagHuntConfig, seeds: list[int]):
        super().__init__()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        size = goal_size(args)
        parameters = 2 * size if args.goal_kind == "continuous" else size
        self.prior = SubgoalPrior(config, generators, args.hidden, size, parameters)
        self.inference = SubgoalInference(config, generators, args.hidden, size, parameters)
        self.moa_state = ActionModel(config, generators, args.hidden, size)
        self.moa = ActionModel(config, generators, args.hidden, size)


def draw_goal(kind: str, parameters, noise, temperature: float):
    """Reparameterised: noise is standard normal, or Gumbel for discrete goals (straight through)."""
    if kind == "continuous":
        mean, spread = parameters.chunk(2, -1)
        return mean + noise * (0.5 * spread.clamp(-8, 4)).exp()
    soft = ((parameters + noise) / temperature).softmax(-1)
    return F.one_hot(soft.argmax(-1), soft.shape[-1]) + soft - soft.detach()


def divergence(kind: str, q, p=None):
    """KL(q || p) [...]; p None: standard normal, or uniform"""
    p = torch.zeros_like(q) if p is None else p
    if kind == "discrete":
        return (q.softmax(-1) * (q.log_softmax(-1) - p.log_softmax(-1))).sum(-1)
    (q_mean, q_spread), (p_mean, p_spread) = q.chunk(2, -1), p.chunk(2, -1)
    q_spread, p_spread = q_spread.clamp(-8, 4), p_spread.clamp(-8, 4)
    ratio = (q_spread - p_spread).exp() + (q_mean - p_mean).square() / p_spread.exp()
    return 0.5 * (ratio - 1 - q_spread + p_spread).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Data: whole games, kept as states


class Games(NamedTuple):
    """G games of T steps; what comes after a game's end is its last state again, and `acted` is False there."""

    states: State  # [G, T + 1, ...]
    actions: torch.Tensor  # uint8 [G, T, N]
    reward: torch.Tensor  # [G, T, N]
    acted: torch.Tensor  # bool [G, T, N] on the board before the step, and the game not over
    kinds: torch.Tensor  # uint8 [G, N] which of PLAYER_PROBS sat there


def play_games(env: StagHuntEnv, players: tuple[str, ...], num_games: int) -> Games:
    numbers = torch.tensor([list(PLAYER_PROBS).index(name) for name in players], device=env.device)
    draw = torch.randint(len(players), (num_games, env.config.num_players), generator=env.generator, device=env.device)
    kinds, states, steps = numbers[draw], [env.initial_state(num_games)], []
    for _ in range(env.config.final_time):
        actions = sample(seat_probs(env, states[-1], kinds), env.generator)
        state, reward, acted, _ = env.transition(states[-1], actions)
        states.append(state)
        steps.append((torch.where(acted, actions, STAY).to(torch.uint8), reward, acted))
    stacked = [torch.stack(field, 1) for field in zip(*steps, strict=True)]
    return Games(State(*(torch.stack(field, 1) for field in zip(*states, strict=True))), *stacked, kinds.to(torch.uint8))


def collect(config: StagHuntConfig, players: tuple[str, ...], seed: int, steps: int, held_out: int, device) -> list[Games]:
    """Games in which players acted at least `steps` times, to train on, and `held_out` others."""
    env, parts, found = StagHuntEnv(config, 1, device, seed), [], 0
    while found < steps:
        parts.append(play_games(env, players, 256))
        found += int(parts[-1].acted.sum())
    return [map_games(lambda *xs: torch.cat(xs), *parts), play_games(env, players, held_out)]


def map_games(function, *games: Games) -> Games:
    states = State(*(function(*fields) for fields in zip(*(g.states for g in games), strict=True)))
    return Games(states, *(function(*fields) for fields in zip(*(g[1:] for g in games), strict=True)))


def save_games(path: str, config: StagHuntConfig, players: tuple[str, ...], games: list[list[Games]]) -> None:
    def plain(g):
        fields = {**g.states._asdict(), **g._asdict()}
        return {name: x.cpu() for name, x in fields.items() if name != "states"}

    content = {"format": "stag-hunt-games-1", "config": dataclasses.asdict(config), "players": players}
    save_atomically(path, content | {"games": [[plain(g) for g in pair] for pair in games]})


def load_games(path: str, config: StagHuntConfig, players: tuple[str, ...], num_seeds: int, device) -> list[list[Games]]:
    """[seed][train, held out]"""
    saved = load_file(path, "stag-hunt-games-1", "data file")
    differs = [f"{k} {v} (asked for: {getattr(config, k)})" for k, v in saved["config"].items() if v != getattr(config, k)]
    if differs:
        raise ValueError(f"{path} holds games of another kind: {', '.join(differs)}")
    if sorted(saved["players"]) != sorted(players):
        raise ValueError(f"{path} holds games of {', '.join(saved['players'])}; asked for: {', '.join(players)}")
    if len(saved["games"]) not in (1, num_seeds):
        raise ValueError(f"{path} holds games for {len(saved['games'])} seeds, {num_seeds} are asked for")
    games = [[_games_from(g, device) for g in pair] for pair in saved["games"]]
    return games if len(games) == num_seeds else games * num_seeds


def _games_from(saved, device):
    state = State(*(saved[name].to(device) for name in State._fields))
    return Games(state, *(saved[name].to(device) for name in Games._fields[1:]))


def save_atomically(path: str | Path, content: dict) -> None:
    """Writes under another name first: what stands at `path` is always whole."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, f"{path}.part")
    os.replace(f"{path}.part", path)


def load_file(path: str | Path, expected: str, what: str) -> dict:
    if not Path(path).is_file():
        raise ValueError(f"there is no {what} {path}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        size, reason = Path(path).stat().st_size, str(error).strip().split("\n")[0]
        raise ValueError(f"{path} is no readable {what}, perhaps cut short ({size} bytes): {reason}") from error
    found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
    if found != expected:
        raise ValueError(f"{path} is no {what} of this script: its format is {found!r}, not {expected!r}")
    return saved


class Careers(NamedTuple):
    """R players' games of T steps, each seen by that player j, in its ego order"""

    things: torch.Tensor  # uint8 [R, T, N + P] cells of the players, stags and hares; H*W: not there
    walls: torch.Tensor  # uint8 [R, T, H*W] (one row for all where the game has none)
    joint: torch.Tensor  # uint8 [R, T, N]
    legal: torch.Tensor  # bool [R, T, 7] j's legal actions
    acted: torch.Tensor  # bool [R, T] j was on the board before the step
    known: torch.Tensor  # float [R, T, kinds, 7] what each kind of player would do in j's place
    kind: torch.Tensor  # int64 [R] which kind j is
    took: torch.Tensor  # int64 [R] which of PREY j took in the end
    last: torch.Tensor  # int64 [R] the last step at which j was on the board


def things(config: StagHuntConfig, env: StagHuntEnv, state: State) -> torch.Tensor:
    """[B, ...] -> uint8 [B, N, N + P], in each player's ego order"""
    nowhere = config.num_cells
    players = env.seats_to_ego(torch.where(state.present, state.position, nowhere))
    prey = torch.where(state.prey_alive, state.prey_position, nowhere)[:, None].expand(-1, config.num_players, -1)
    return torch.cat([players, prey], 2).to(torch.uint8)


def careers(env: StagHuntEnv, games: Games, players: tuple[str, ...], limit: int | None = None) -> Careers:
    """All players of all games, game after game; only the first `limit` samples count as acted."""
    config, (num_games, steps, n) = env.config, games.actions.shape
    before = State(*(x[:, :-1].flatten(0, 1) for x in games.states))

    def by_player(x):  # [G * T, N, ...] -> [G * N, T, ...]
        return x.unflatten(0, (num_games, steps)).transpose(1, 2).flatten(0, 1)

    known = torch.stack([PLAYER_PROBS[name](env, before, ALL_SEATS) for name in players], 2)
    acted = by_player(games.acted.flatten(0, 1))
    if limit is not None:
        acted &= acted.flatten().cumsum(0).view_as(acted) <= limit
    clock = torch.arange(steps, device=env.device)
    last = torch.where(acted, clock, 0).amax(1)
    final = by_player(games.actions.flatten(0, 1)).gather(1, last[:, None])[:, 0].long()
    gone = by_player(games.states.present[:, 1:].flatten(0, 1)).gather(1, last[:, None])[:, 0] == 0
    numbers = [list(PLAYER_PROBS).index(name) for name in players]
    kind = (games.kinds.flatten()[:, None] == torch.tensor(numbers, device=env.device)).long().argmax(1)
    walls = before.walls[:, None].expand(-1, n, -1) if config.max_wall_pieces else before.walls[:, None, :1].expand(-1, n, -1)
    return Careers(
        by_player(things(config, env, before)),
        by_player(walls),
        by_player(env.seats_to_ego(games.actions.flatten(0, 1))),
        by_player(env.legal_actions(before)),
        acted,
        by_player(known),
        kind,
        torch.where(gone, final - STAY, 0),  # hunt stag is 5, hunt hare is 6
        last,
    )


def symmetries(config: StagHuntConfig, device) -> tuple[torch.Tensor, torch.Tensor]:
    """cells [8 or 4, H*W + 1] and actions [8 or 4, 7] under the board's symmetries"""
    h, w = config.height, config.width
    grid, steps = np.arange(h * w).reshape(h, w), {(-1, 0): 0, (1, 0): 1, (0, -1): 2, (0, 1): 3}
    cells, actions = [], []
    for flip in (False, True):
        for turns in range(4) if h == w else (0, 2):
            moved = np.rot90(np.flip(grid, 1) if flip else grid, turns)
            to = np.empty(h * w + 1, dtype=np.int64)
            to[moved.flatten()], to[-1] = np.arange(h * w), h * w
            vectors = [(dy, -dx if flip else dx) for dy, dx in steps]
            for _ in range(turns):
                vectors = [(-dx, dy) for dy, dx in vectors]
            cells.append(to)
            actions.append([*(steps[v] for v in vectors), 4, 5, 6])
    return torch.tensor(np.stack(cells), device=device), torch.tensor(actions, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Losses


class Batch(NamedTuple):
    """n samples of B players' games (careers) of T steps, packed: only steps at which j acted, and a few to fill up"""

    things: torch.Tensor  # int64 [M, n, N + P]
    walls: torch.Tensor  # float [M, n, H*W]
    joint: torch.Tensor  # int64 [M, n, N]
    legal: torch.Tensor  # bool [M, n, 7]
    weight: torch.Tensor  # float [M, n] 1 where j acted, else 0
    clock: torch.Tensor  # float [M, n]
    place: torch.Tensor  # int64 [M, n] career * T + step
    last: torch.Tensor  # int64 [M, n] which sample is the last of the same career
    careers: int
    steps: int

    @property
    def action(self):
        return self.joint[..., 0]


def make_batch(config: StagHuntConfig, data: Careers, index: torch.Tensor, samples: int, symmetry=None) -> Batch:
    """data [S, R, ...]; index [S, B] of careers; samples n; optionally symmetry (cells, actions, which [S, B])"""
    seed, steps = torch.arange(len(index), device=index.device)[:, None], data.acted.shape[2]
    acted = data.acted[seed, index].flatten(1)
    place = acted.int().argsort(dim=1, descending=True, stable=True)[:, :samples]
    career, step = place // steps, place % steps
    row = index.gather(1, career)
    cells, walls, joint, legal = (x[seed, row, step] for x in data[:4])
    cells, walls, joint = cells.long(), walls.float(), joint.long()
    if symmetry is not None:
        to_cell, to_action, which = symmetry
        which = which.gather(1, career)
        cells, joint = to_cell[which].gather(2, cells), to_action[which].gather(2, joint)
        legal = legal.gather(2, to_action.argsort(1)[which])
        if config.max_wall_pieces:
            walls = walls.gather(2, to_cell[:, :-1].argsort(1)[which])
    number = torch.arange(samples, device=index.device).expand_as(place)
    slot = torch.zeros_like(acted, dtype=torch.int64).scatter(1, place, number)
    last = slot.gather(1, career * steps + data.last[seed, row])
    clock = step / config.final_time
    return Batch(cells, walls, joint, legal, acted.gather(1, place).float(), clock, place, last, index.shape[1], steps)


def planes(config: StagHuntConfig, batch: Batch) -> torch.Tensor:
    """float [M, n, C * H*W]: the boards to reconstruct"""
    n, stags = config.num_players, config.num_stags
    one_hot = torch.eye(config.num_cells + 1, config.num_cells, device=batch.things.device)[batch.things]
    walls = batch.walls if config.max_wall_pieces else torch.zeros_like(one_hot[..., 0, :])
    shared = torch.stack([walls, one_hot[..., n : n + stags, :].sum(-2), one_hot[..., n + stags :, :].sum(-2)], -2)
    return torch.cat([one_hot[..., :n, :], shared], -2).flatten(-2)


def infer_careers(inference: SubgoalInference, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Distribution parameters [M, n, _], and the summaries [M, n, hidden] of what came before each sample."""
    state = inference.encoder(batch.things, batch.walls)
    event, place = inference.evidence(state, batch.joint), batch.place[..., None].expand_as(state)
    grid = state.new_zeros(len(state), batch.careers * batch.steps, state.shape[2]).scatter(1, place, event)
    grid = grid.unflatten(1, (batch.careers, batch.steps))  # [M, B, T, hidden]
    # All steps at once: before step t, event u < t has been multiplied by decay t - 1 - u times.
    clock = torch.arange(batch.steps, device=state.device)
    ago = clock[:, None] - clock - 1
    decay = inference.decay.sigmoid().movedim(1, 2)[..., None]
    kept = torch.where(ago >= 0, decay ** ago.clamp(min=0), 0.0)  # [M, hidden, T, T]
    summary = torch.einsum("mhtu,mbuh->mbth", kept, grid).flatten(1, 2).gather(1, place)
    return inference(state, summary), summary


def infer(args: Args, models: Models, batch: Batch, noise, temperature: float):
    """Goals and log-probabilities of both predictors, [M, n, _]; noise for each"""
    prior = models.prior(batch.things, batch.walls)
    posterior, summary = infer_careers(models.inference, batch)
    goals = [draw_goal(args.goal_kind, p, e, temperature) for p, e in zip((prior, posterior), noise, strict=True)]
    log_probs = []
    for moa, p, goal in zip((models.moa_state, models.moa), (prior, posterior), goals, strict=True):
        p, goal = (p.detach(), goal.detach()) if args.loss == "recon" else (p, goal)
        drawn = [(goal, 1.0)] if args.goal_kind == "continuous" else every_goal(p)
        log_probs.append(average(moa, batch, drawn))
    return prior, posterior, summary, goals, log_probs


def every_goal(parameters):
    """Discrete: all categories with their probabilities. The action's likelihood is averaged over them exactly, because one
    straight-through draw tells the encoder too little: it then settles on one category for everything."""
    weights, every = parameters.softmax(-1), torch.eye(parameters.shape[-1], device=parameters.device)
    return [(goal.expand_as(weights), weights[..., k : k + 1]) for k, goal in enumerate(every)]


def average(moa: ActionModel, batch: Batch, drawn) -> torch.Tensor:
    """log-probabilities [M, n, 7] averaged over weighted goals"""
    features = moa.encoder(batch.things, batch.walls)
    if len(drawn) == 1:
        return moa(features, batch.clock, drawn[0][0], batch.legal)
    probs = sum(weight * moa(features, batch.clock, goal, batch.legal).exp() for goal, weight in drawn)
    return probs.clamp(min=1e-30).log()


def losses(args: Args, config: StagHuntConfig, models, batch: Batch, noise, temperature: float) -> dict[str, torch.Tensor]:
    """Each [M], the mean over the samples of the batch."""
    prior, posterior, summary, goals, log_probs = infer(args, models, batch, noise, temperature)
    count = batch.weight.sum(1).clamp(min=1)

    def mean(x):  # only steps at which j was on the board
        return (x * batch.weight).sum(1) / count

    truth, parts = planes(config, batch), {}
    guesses = models.prior.reconstruct(goals[0]), models.inference.reconstruct(goals[1], summary)
    for name, guess in zip(("vae", "cvae"), guesses, strict=True):
        parts[f"recon_{name}"] = mean(F.binary_cross_entropy_with_logits(guess, truth, reduction="none").mean(2))
    # The hindsight subgoal s^g is the last state before j left ("final"); the prior is not moved by it.
    hindsight = prior.detach().gather(1, batch.last[..., None].expand_as(prior))
    parts["kl_vae"] = mean(divergence(args.goal_kind, prior))
    parts["kl_cvae"] = mean(divergence(args.goal_kind, posterior, hindsight))
    for name, log_prob in zip(("vae", "cvae"), log_probs, strict=True):
        parts[f"moa_{name}"] = -mean(log_prob.gather(2, batch.action[..., None])[..., 0])
        parts[f"recon_total_{name}"] = parts[f"recon_{name}"] + args.kl_coef * parts[f"kl_{name}"]
        parts[f"moa_total_{name}"] = parts[f"moa_{name}"] + args.kl_coef * parts[f"kl_{name}"]
    # With --loss recon the action models learn too, but on subgoals that they cannot move; with moa the decoders rest.
    recon = 0.0 if args.loss == "moa" else 1.0
    kl = args.kl_coef * (parts["kl_vae"] + parts["kl_cvae"])
    parts["total"] = recon * (parts["recon_vae"] + parts["recon_cvae"]) + kl + parts["moa_vae"] + parts["moa_cvae"]
    return parts


def goal_size(args: Args) -> int:
    return args.goal_dim if args.goal_kind == "continuous" else args.num_goals


def draw_noise(args: Args, shape: tuple[int, ...], generator) -> list[torch.Tensor]:
    """For the two predictors: normal, or Gumbel for discrete goals."""
    shape, device = (*shape, goal_size(args)), generator.device
    if args.goal_kind == "continuous":
        return [torch.randn(shape, generator=generator, device=device) for _ in range(2)]
    uniform = [torch.rand(shape, generator=generator, device=device) for _ in range(2)]
    return [-torch.log(-torch.log(u.clamp(1e-6, 1 - 1e-6))) for u in uniform]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


@torch.no_grad()
def predictions(args: Args, config: StagHuntConfig, models: Models, data: Careers, size: int = 512):
    """Probabilities of the four PREDICTORS [4, S, R, T, 7] and the mean goals of the first two [S, R, T, goal]."""
    device, (num_seeds, num_rows, steps) = data.things.device, data.acted.shape
    seed = torch.arange(num_seeds, device=device)[:, None]
    generator = torch.Generator(device).manual_seed(0)
    probs = torch.zeros(4, num_seeds, num_rows, steps, NUM_ACTIONS, device=device)
    goals = [torch.zeros(num_seeds, num_rows, steps, goal_size(args), device=device) for _ in range(2)]
    for rows in torch.arange(num_rows, device=device).split(size):
        index = rows.expand(num_seeds, -1)
        samples = int(data.acted[:, rows].sum((1, 2)).max())
        batch = make_batch(config, data, index, samples)
        posterior, _ = infer_careers(models.inference, batch)
        row, step = index.gather(1, batch.place // steps), batch.place % steps
        for k, (moa, p) in enumerate(((models.moa_state, models.prior(batch.things, batch.walls)), (models.moa, posterior))):
            mean, drawn = spread_goals(args, p, generator)
            probs[k, seed, row, step] = average(moa, batch, drawn).exp()
            goals[k][seed, row, step] = mean
        known = data.known[seed, index]  # [S, B, T, kinds, 7]
        played = known.gather(4, data.joint[seed, index][..., :1, None].long().expand(*known.shape[:4], 1))[..., 0]
        evidence = (played.clamp(min=1e-30).log() * data.acted[seed, index][..., None]).cumsum(2).roll(1, 2)
        evidence[:, :, 0] = 0  # what was seen before step t; all kinds are equally likely before that
        probs[2, seed, index] = (evidence.softmax(3)[..., None] * known).sum(3)
        kind = data.kind[seed, index].view(*index.shape, 1, 1, 1).expand(*known.shape[:3], 1, NUM_ACTIONS)
        probs[3, seed, index] = known.gather(3, kind)[:, :, :, 0]
    return probs, goals


def spread_goals(args: Args, parameters, generator, draws: int = 8):
    """The mean goal, and goals with weights that stand for the whole distribution: what j does is averaged over them."""
    if args.goal_kind == "discrete":
        return parameters.softmax(-1), every_goal(parameters)
    noise = torch.randn(draws, *parameters.shape[:-1], args.goal_dim, generator=generator, device=generator.device)
    drawn = [(draw_goal("continuous", parameters, e, 1.0), 1 / draws) for e in noise]
    return parameters.chunk(2, -1)[0], drawn


def votes(probs: np.ndarray) -> np.ndarray:
    """probs [n, 7] -> the predicted action [n, 7]. Where actions are equally likely (within 0.1), the prediction is
    split between them: else the order of the actions would decide who is right."""
    tied = probs >= probs.max(1, keepdims=True) - 0.1
    with np.errstate(invalid="ignore"):
        return tied / tied.sum(1, keepdims=True)


def classifier_metrics(probs: np.ndarray, action: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """probs [n, 7], action [n] -> figures and confusion matrix [true, predicted]"""
    own = probs[np.arange(len(action)), action]
    confusion = np.zeros((NUM_ACTIONS, NUM_ACTIONS))
    np.add.at(confusion, action, votes(probs))
    confidence, right = probs.max(1), probs.argmax(1) == action
    bins = np.clip(np.nan_to_num(confidence * 15), 0, 14).astype(int)  # as an integer, NaN depends on the machine
    gaps = [abs(confidence[bins == b].sum() - right[bins == b].sum()) for b in range(15)]
    hit, count, guessed = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        recall, precision = hit / count, hit / guessed
        f1 = np.nan_to_num(2 * hit / (count + guessed))
    figures = {
        "top1": hit.sum() / len(action),
        "top3": (np.argsort(-probs, 1, kind="stable")[:, :3] == action[:, None]).any(1).mean(),
        "nll": -np.log(np.maximum(own, 1e-12)).mean(),
        "ece": sum(gaps) / len(action),
        "macro_f1": f1[count > 0].mean(),
    }
    for a in range(NUM_ACTIONS):
        figures |= {f"count/{a}": count[a], f"share/{a}": count[a] / len(action)}
        figures |= {f"precision/{a}": precision[a], f"recall/{a}": recall[a], f"f1/{a}": f1[a]}
    return {key: float(value) for key, value in figures.items()}, confusion


def by_step(values: np.ndarray, steps: np.ndarray, final_time: int) -> np.ndarray:
    """mean of values at each step of the game"""
    count = np.bincount(steps, minlength=final_time)
    with np.errstate(invalid="ignore"):
        return np.bincount(steps, values, minlength=final_time) / count


def probe(goals: torch.Tensor, took: torch.Tensor, weight: torch.Tensor, test: tuple, steps: int = 200) -> torch.Tensor:
    """Does a linear reading of g tell which prey j will take? Fitted to [R, T, goal]; bool [R, T]: right on `test`."""
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        layer = StackedLinear([generator], goals.shape[2] + 1, len(PREY)).to(goals.device)
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
        ones = torch.ones_like(goals[..., :1])
        scale = goals.std((0, 1)).clamp(min=1e-6)
        x, label = torch.cat([goals / scale, ones], 2), took[:, None].expand(goals.shape[:2])
        for _ in range(steps):
            loss = F.cross_entropy(layer(x[None])[0].movedim(2, 1), label, reduction="none")
            optimiser.zero_grad()
            ((loss * weight).sum() / weight.sum()).backward()
            optimiser.step()
    test_goals, test_took = test
    x = torch.cat([test_goals / scale, torch.ones_like(test_goals[..., :1])], 2)
    return (layer(x[None])[0].argmax(2) == test_took[:, None]).detach()


def measure(args: Args, config: StagHuntConfig, models: Models, held_out: Careers) -> tuple[list[dict], list[dict]]:
    """Per seed: {predictor: figures} and what is drawn."""
    probs, goals = predictions(args, config, models, held_out)
    tables, pictures = [], []
    for s in range(probs.shape[1]):
        acted = held_out.acted[s].cpu().numpy()
        action = held_out.joint[s, ..., 0].cpu().numpy()[acted].astype(int)
        steps = np.broadcast_to(np.arange(acted.shape[1]), acted.shape)[acted]
        table, picture = {}, {"goals": [g[s] for g in goals]}
        for name, p in zip(PREDICTORS, probs[:, s], strict=True):
            p = p.cpu().numpy()[acted]
            table[name], confusion = classifier_metrics(p, action)
            right = votes(p)[np.arange(len(action)), action]
            picture[name] = {"confusion": confusion, "by_step": by_step(right, steps, config.final_time)}
        tables.append(table)
        pictures.append(picture)
    return tables, pictures


def interval(values: list[float]) -> tuple[float, float]:
    """mean and half width of its 95 % interval (Student's t over seeds)"""
    values = [v for v in values if not math.isnan(v)]
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    from scipy import stats  # takes half a second to load

    t = float(stats.t.ppf(0.975, len(values) - 1))
    return float(np.mean(values)), t * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def write_evaluation(folder: Path, name: str, table: dict, picture: dict) -> None:
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["metric", *table])
        for key in next(iter(table.values())):
            writer.writerow([key, *(figures[key] for figures in table.values())])
    arrays = {f"{k}/{p}": picture[p][k] for p in table for k in ("confusion", "by_step")}
    np.savez(folder / f"{name}.npz", **{key.replace(" ", "_").replace(":", ""): value for key, value in arrays.items()})


def show_table(tables: list[dict]) -> str:
    keys = ["top1", "top3", "nll", "ece", "macro_f1", *(f"recall/{a}" for a in range(NUM_ACTIONS))]
    lines = ["".ljust(12) + "".join(name.rjust(30) for name in PREDICTORS)]
    for key in keys:
        line = key.ljust(12)
        for name in PREDICTORS:
            mean, half = interval([table[name][key] for table in tables])
            line += (f"{mean:.4f}" + ("" if math.isnan(half) else f" ± {half:.4f}")).rjust(30)
        lines.append(line)
    return "\n".join(lines)


@contextlib.contextmanager
def surviving(what: str):
    """A picture must never cost a run: whatever fails in here is told in one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        print(f"could not {what}: {type(error).__name__}: {reason}; the run goes on", flush=True)


def draw(folder: Path, table: dict, picture: dict, curves: list[dict], probes: dict[str, np.ndarray]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=75)
        plt.close(figure)

    figure, axis = plt.subplots(figsize=(6, 3))
    axis.bar(ACTION_NAMES, [table[PREDICTORS[0]][f"share/{a}"] for a in range(NUM_ACTIONS)], color="#3478c8")
    axis.set(ylabel="share of the held-out samples", title="class distribution")
    axis.tick_params(axis="x", rotation=30)
    save(figure, "class_distribution")

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6))
    for axis, name in zip(axes, PREDICTORS[:3], strict=True):
        confusion = picture[name]["confusion"]
        share = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
        axis.imshow(share, cmap="Blues", vmin=0, vmax=1)
        for (y, x), value in np.ndenumerate(share):
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if value > 0.6 else "black")
        axis.set(title=name, xlabel="predicted", xticks=range(NUM_ACTIONS), yticks=range(NUM_ACTIONS))
        axis.set_xticklabels(ACTION_NAMES, rotation=40, fontsize=7)
        axis.set_yticklabels(ACTION_NAMES, fontsize=7)
    axes[0].set_ylabel("true")
    save(figure, "confusion")

    figure, axis = plt.subplots(figsize=(8, 3.4))
    for k, name in enumerate(PREDICTORS):
        values = [table[name][f"recall/{a}"] for a in range(NUM_ACTIONS)]
        axis.bar(np.arange(NUM_ACTIONS) + 0.2 * (k - 1.5), values, 0.2, label=name)
    axis.set(ylabel="recall", xticks=range(NUM_ACTIONS), ylim=(0, 1.25))
    axis.set_xticklabels(ACTION_NAMES)
    axis.legend(fontsize=7, ncols=2)
    save(figure, "recall")

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True)
    for axis, (part, title) in zip(axes, (("vae", "state only (VAE)"), ("cvae", "with history (CVAE)")), strict=True):
        epochs = [row["epoch"] for row in curves]
        axis.plot(epochs, [row[f"moa_total_{part}"] for row in curves], label="action cross-entropy + a KL")
        axis.plot(epochs, [row[f"recon_total_{part}"] for row in curves], label="reconstruction + a KL")
        axis.set(title=title, xlabel="epoch")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    figure.suptitle("The same run: only the choice of loss makes the total look large or small", fontsize=10)
    save(figure, "loss")

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
    for name in PREDICTORS:
        axes[0].plot(picture[name]["by_step"], label=name)
    axes[0].set(xlabel="step of the game", ylabel="top-1", title="how fast is a co-player recognised?")
    axes[0].legend(fontsize=7)
    for name, values in probes.items():
        axes[1].plot(values, label=name)
    axes[1].set(xlabel="step of the game", ylabel="probe accuracy", title="does g tell which prey j will take?")
    axes[1].legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
    save(figure, "by_step")


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def clip_per_model(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clips the gradient of each of the M stacked models by its own norm; returns the norms [M]."""
    norms = torch.cat([p.grad.flatten(1) for p in parameters], 1).norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for p in parameters:
        p.grad.mul_(factor.view(-1, *[1] * (p.dim() - 1)))
    return norms


def train_epoch(args: Args, config, models, optimiser, data: Careers, generator, table, epoch: int) -> dict[str, list[float]]:
    """One pass over the players' games; returns the mean of every loss [M] over all samples."""
    num_seeds, rows = data.last.shape
    order = torch.rand(num_seeds, rows, generator=generator, device=generator.device).argsort(1)
    batches = order.split(args.batch_size, 1)
    sizes = torch.stack([data.acted.sum(2).gather(1, index).sum(1).max() for index in batches]).tolist()
    total, samples = {}, torch.zeros(num_seeds, device=generator.device)
    for number, (index, size) in enumerate(zip(batches, sizes, strict=True)):
        progress = (epoch + number / len(batches)) / args.epochs
        for group in optimiser.param_groups:
            group["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        which = torch.randint(len(table[0]), index.shape, generator=generator, device=generator.device)
        batch = make_batch(config, data, index, size, (*table, which) if args.augment else None)
        noise = draw_noise(args, batch.clock.shape, generator)
        start, end = args.temperature
        parts = losses(args, config, models, batch, noise, start * (end / start) ** progress)
        optimiser.zero_grad(set_to_none=True)
        parts["total"].sum().backward()
        clip_per_model([p for p in models.parameters() if p.grad is not None], args.max_grad_norm)
        optimiser.step()
        count = batch.weight.sum(1)
        samples += count
        for key, value in parts.items():
            total[key] = total.get(key, 0.0) + value.detach() * count
    return {key: (value / samples).tolist() for key, value in total.items()}


def checked(args: Args) -> StagHuntConfig:
    """Refuses wrong flags before anything is written."""
    config = args.config.checked()
    resolve_device(args.device)
    check_players(args.players)
    if not args.players:
        raise ValueError("--players needs at least one name")
    for name in ("num_seeds", "num_samples", "held_out_games", "goal_dim", "num_goals", "hidden", "epochs", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, not {getattr(args, name)}")
    for name in ("learning_rate", "max_grad_norm"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be a positive number, not {getattr(args, name)}")
    if Path(args.run_dir).exists() and not Path(args.run_dir).is_dir():
        raise ValueError(f"--run-dir {args.run_dir} is not a folder")
    if not 0 <= args.kl_coef < math.inf:
        raise ValueError(f"--kl-coef must be a number >= 0, not {args.kl_coef}")
    if config.num_cells > 255:
        raise ValueError(f"this script takes boards of up to 255 cells, not {config.num_cells}")
    if min(args.temperature) <= 0:
        raise ValueError(f"--temperature needs two positive numbers, not {args.temperature}")
    return config


def args_from(saved: dict, **changes) -> Args:
    return Args(**{**saved, **changes, "config": StagHuntFlags(**saved["config"])})


def main(args: Args) -> dict[str, float]:
    """Returns the final figures, averaged over seeds, as {"with history/top1": ...}."""
    config = checked(args)
    checkpoint = None
    if args.resume:
        checkpoint = load_file(args.resume, "subgoals-2", "VAE checkpoint")
        args = args_from(checkpoint["args"], resume=args.resume, device=args.device)
        config = args.config.checked()
    device, started = resolve_device(args.device), time.time()
    # On a GPU the gradient of a lookup table otherwise adds up in any order, and no run is like another.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.resume and checkpoint["device"] != device.type:
        raise ValueError(
            f"{args.resume} is a run on {checkpoint['device']}: it cannot be continued bit for bit on {device.type}"
        )
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    env = StagHuntEnv(config, 1, device, args.seed)
    if args.data:
        games = load_games(args.data, config, args.players, args.num_seeds, device)
    else:
        games = [collect(config, args.players, s, args.num_samples, args.held_out_games, device) for s in seeds]
    if args.save_data:
        save_games(args.save_data, config, args.players, games)
    smallest = min(int(pair[0].acted.sum()) for pair in games)
    if smallest < args.num_samples:
        raise ValueError(f"{args.data} holds {smallest} samples to train on, {args.num_samples} are asked for")
    data = stack_careers([careers(env, pair[0], args.players, args.num_samples) for pair in games])
    held_out = stack_careers([careers(env, pair[1], args.players) for pair in games])
    watched = Careers(*(x[:, :1000] for x in held_out))  # after each epoch; all of them at the end
    models = Models(args, config, seeds).to(device)
    optimiser = torch.optim.Adam(models.parameters(), lr=args.learning_rate)
    generator = torch.Generator(device).manual_seed(args.seed)
    table = symmetries(config, device)
    done, spent = 0, 0.0
    if checkpoint:
        models.load_state_dict(checkpoint["model"])
        optimiser.load_state_dict(checkpoint["optimiser"])
        generator.set_state(checkpoint["generator"])
        done, folders, spent = checkpoint["epoch"], [Path(f) for f in checkpoint["folders"]], checkpoint["seconds"]
        for folder in folders:
            keep_lines(folder / "metrics.jsonl", "epoch", done)
    else:
        stamp = int(time.time())
        while any(Path(args.run_dir).glob(f"*__{stamp}")):  # another run began in the same second
            stamp += 1
        folders = [Path(args.run_dir) / f"{args.exp_name}__{config.setting}_{args.goal_kind}__{s}__{stamp}" for s in seeds]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=2) + "\n")
    writers = [SummaryWriter(folder, purge_step=done + 1) for folder in folders]
    print(f"{config.setting}, {args.goal_kind} subgoals, {args.num_samples} samples of {', '.join(args.players)}, on {device}")
    print(f"data ready after {time.time() - started:.1f} s; run folder {folders[0]}", flush=True)

    def save(name="checkpoint.pt"):
        saved_args = {k: v for k, v in dataclasses.asdict(args).items() if k != "resume"}
        content = {
            "format": "subgoals-2",
            "args": saved_args,
            "model": models.state_dict(),
            "optimiser": optimiser.state_dict(),
        }
        content |= {
            "generator": generator.get_state(),
            "epoch": done,
            "device": device.type,
            "seconds": spent + time.time() - started,
        }
        save_atomically(folders[0] / name, content | {"folders": [str(f) for f in folders]})

    bar = tqdm(initial=done, total=args.epochs, unit="epoch", mininterval=1)
    while done < args.epochs:
        parts = train_epoch(args, config, models, optimiser, data, generator, table, done)
        done += 1
        bad = [key for key, values in parts.items() if not all(math.isfinite(x) for x in values)]
        if bad:
            save("checkpoint_bad.pt")
            raise FloatingPointError(f"losses/{bad[0]} is not finite in epoch {done}; see {folders[0]}/checkpoint_bad.pt")
        tables, pictures = measure(args, config, models, watched)
        for s, (folder, writer) in enumerate(zip(folders, writers, strict=True)):
            row = {f"losses/{key}": values[s] for key, values in parts.items()}
            row |= {f"{TAGS[name]}/{key}": value for name, figures in tables[s].items() for key, value in figures.items()}
            with surviving("write to TensorBoard"):
                for key, value in row.items():
                    writer.add_scalar(key, value, done)
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"epoch": done, **finite(row)}) + "\n")
            write_evaluation(folder / "evaluation", f"epoch_{done}", tables[s], pictures[s])
        best = np.mean([t["ceiling: Bayes from history"]["top1"] for t in tables])
        now = np.mean([t["with history"]["top1"] for t in tables])
        bar.set_postfix_str(f"loss {np.mean(parts['total']):.4g}, top-1 with history {now:.4f} (ceiling {best:.4f})")
        bar.update()
        save()
    bar.close()

    tables, pictures = measure(args, config, models, held_out)
    _, train_goals = predictions(args, config, models, Careers(*(x[:, :4000] for x in data)))
    for s, (folder, writer) in enumerate(zip(folders, writers, strict=True)):
        curves = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curves = [{key.removeprefix("losses/"): value for key, value in row.items()} for row in curves]
        acted = held_out.acted[s].cpu().numpy()
        steps, probes = np.broadcast_to(np.arange(acted.shape[1]), acted.shape)[acted], {}
        for i, name in enumerate(PREDICTORS[:2]):
            test = (pictures[s]["goals"][i], held_out.took[s])
            right = probe(train_goals[i][s], data.took[s, :4000], data.acted[s, :4000].float(), test).cpu().numpy()[acted]
            probes[name] = by_step(right, steps, config.final_time)
            tables[s][name]["probe_accuracy"] = float(right.mean())
        for name in PREDICTORS[2:]:
            tables[s][name]["probe_accuracy"] = math.nan
        write_evaluation(folder / "evaluation", "final", tables[s], pictures[s])
        with surviving("draw"):
            draw(folder, tables[s], pictures[s], curves, probes)
        with surviving("write to TensorBoard"):
            for name in PREDICTORS[:2]:
                writer.add_scalar(f"omg/probe_accuracy/{name}", tables[s][name]["probe_accuracy"], done)
                for t, value in enumerate(probes[name]):
                    if not math.isnan(value):
                        writer.add_scalar(f"omg/probe_accuracy_by_step/{name}", value, t)
            for picture in sorted(folder.glob("*.png")):
                writer.add_image(picture.stem, read_picture(picture), done, dataformats="HWC")
            writer.close()
    print(f"held-out games, {args.num_seeds} seed(s); pictures and CSV in {folders[0]}")
    print(show_table(tables))
    for name in PREDICTORS[:2]:
        mean, half = interval([t[name]["probe_accuracy"] for t in tables])
        print(f"probe accuracy of g, {name}: {mean:.4f}" + ("" if math.isnan(half) else f" ± {half:.4f}"))
    print(f"{spent + time.time() - started:.1f} s in all; checkpoint {folders[0]}/checkpoint.pt")
    figures = {f"{name}/{key}": interval([t[name][key] for t in tables])[0] for name in PREDICTORS for key in tables[0][name]}
    return {"checkpoint": str(folders[0] / "checkpoint.pt"), **figures}


def stack_careers(parts: list[Careers]) -> Careers:
    """[S, R, ...]: the rows that hold samples, filled up to the largest number of them among the seeds"""
    rows = max(int((p.acted.any(1) * torch.arange(1, len(p.acted) + 1, device=p.acted.device)).max()) for p in parts)

    def fit(x):
        return x[:rows] if len(x) >= rows else torch.cat([x, torch.zeros_like(x[:1]).expand(rows - len(x), *x.shape[1:])])

    return Careers(*(torch.stack([fit(x) for x in field]) for field in zip(*parts, strict=True)))


def finite(row: dict[str, float]) -> dict[str, float | None]:
    """JSON knows no nan (the precision of an event that was never predicted, say): null."""
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


def keep_lines(path: Path, counter: str, last: int) -> None:
    """Drops what was logged after the checkpoint."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines if json.loads(line)[counter] <= last))


def read_picture(path: Path) -> np.ndarray:
    import matplotlib.image

    return (matplotlib.image.imread(path)[..., :3] * 255).astype(np.uint8)


if __name__ == "__main__":
    command_line(Args, main)
