"""Pretrains the world model on games of rule-based players, and measures it like a simulator.

    python pretrain_world_model.py                                    # structured head, 4x4, 50 000 transitions
    python pretrain_world_model.py --wm-head pixel                    # the per-pixel MSE head, for comparison
    python pretrain_world_model.py --num-seeds 5 --height 8 --width 8
    python pretrain_world_model.py --evaluate runs/RUN/checkpoint.pt --evaluate-board 6x9
    python pretrain_world_model.py --resume runs/RUN/checkpoint.pt

A transition is one player's view of one step: (its planes, the joint action in its ego order) -> (its planes one step
later, its own reward). `docs/pretraining.md` explains every figure this script prints.
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
    NUM_ACTIONS,
    PLAYER_PROBS,
    STAY,
    StagHuntConfig,
    StagHuntEnv,
    StagHuntFlags,
    State,
    check_players,
    command_line,
    parse_board,
    resolve_device,
    sample,
    seat_probs,
)

STEPS_AHEAD = (1, 3, 5, 10, 20)
EVENTS = ("none", "hare", "stag")


@dataclasses.dataclass
class Args:
    exp_name: str = "pretrain_world_model"
    """first part of the run's name"""
    seed: int = 1
    """seed of the first experiment; the others count up from it"""
    num_seeds: int = 1
    """experiments side by side, each with its own games (unless --data holds one set), weights and TensorBoard run"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    run_dir: str = "runs"
    """folder in which the runs' folders are made"""
    players: tuple[str, ...] = ("random", "nearest_stag", "nearest_hare")
    """who plays the games: each seat of each game draws one of these"""
    num_transitions: int = 50_000
    """transitions to train on"""
    held_out_games: int = 1000
    """further games to measure on"""
    data: str | None = None
    """take the games from this file instead of playing them"""
    save_data: str | None = None
    """write the games to this file"""
    wm_head: Literal["structured", "pixel"] = "structured"
    """structured: where each player goes, which prey is taken, what is paid; pixel: every cell by mean squared error"""
    wm_hidden: int = 128
    """width of the hidden layers (the pixel head's are twice as wide)"""
    wm_ensemble: int = 1
    """world models per experiment, same data, other weights and minibatches"""
    wm_channel_weights: tuple[float, ...] | None = None
    """pixel head: weight of each plane's error, for example 2 2 2 2 1 1 1 (None: all 1)"""
    num_updates: int = 3000
    """optimiser steps"""
    log_every: int = 200
    """updates between two measurements, which are also checkpoints"""
    batch_size: int = 256
    """transitions per update and model, drawn with replacement"""
    learning_rate: float = 2e-3
    """Adam's step size at the start; falls to 0 along a cosine"""
    max_grad_norm: float = 1.0
    """clip each model's gradient to this norm"""
    resume: str | None = None
    """continue the run of this checkpoint, bit for bit, on the same kind of device; all other flags come from it"""
    evaluate: str | None = None
    """only measure this checkpoint: tables and pictures beside it; the other flags come from it"""
    evaluate_board: str | None = None
    """--evaluate: on a board of this size, for example 6x9 (structured head only)"""
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


class Prediction(NamedTuple):
    """M models, B boards"""

    board: torch.Tensor  # uint8 [M, B, C, H, W] the most likely next board
    raw: torch.Tensor | None  # float [M, B, C, H, W] the numbers behind it
    reward: torch.Tensor  # [M, B]


def padding(size: int) -> int:
    """How many zeros beside a layer's inputs or outputs: GPUs multiply matrices faster whose rows begin at multiples of 32
    bytes (of 16 in bfloat16)."""
    return -size % 8


class WorldModel(nn.Module):
    """Structured head. The rules are local, and so is the network: around each player it sees the 3x3 cells with everyone's
    action painted on them, and says where that player goes (one of 4 neighbours, stay, gone), whether the prey on its cell
    is taken and, for the observer, which payoff is paid. No weight belongs to a cell or a seat, so any board size will do,
    and whatever the weights, players cannot jump, split, fade or leave where no prey stands, prey cannot appear, and the
    reward is one that exists. Whether leavers, prey taken and payoff fit together is left to be learned."""

    def __init__(self, config: StagHuntConfig, generators: list[torch.Generator], hidden: int):
        super().__init__()
        self.config = config
        n, width, cells = config.num_players, config.width, config.num_cells
        row, column = np.divmod(np.arange(cells), width)
        down, right = row - row[:, None], column - column[:, None]  # [from, to]
        near = np.where((abs(down) <= 1) & (abs(right) <= 1), 3 * (down + 1) + right + 1, 9)
        around = np.full((cells, 9), cells)  # cell number `cells` lies off the board
        around[np.nonzero(near < 9)[0], near[near < 9]] = np.nonzero(near < 9)[1]
        target = around[:, [1, 7, 3, 5, 4]]  # where up, down, left, right and stay lead
        seat = np.arange(n)
        self.table("near", near)  # [H*W, H*W] -> which of the 9 cells around, 9: none
        self.table("around", around)  # [H*W, 9]
        self.table("target", target)  # [H*W, 5]
        self.table("outcome", np.array([4, 0, 4, 2, 4, 3, 4, 1, 4, 4])[near])  # [H*W, H*W] -> which move leads there
        self.table("order", (seat[:, None] + seat) % n)  # each player's own ego order
        self.table("codes", np.arange(9 * NUM_ACTIONS))  # who does what where
        self.table("one_hot", np.eye(cells + 1, cells), torch.float32)
        self.table("payoffs", np.array(list(config.payoffs())), torch.float32)
        # The player's own action, how many of the others do what where (a sum: two hunters differ from one), the board; and,
        # only where players differ in strength, who of the others does it.
        self.by_name = config.strengths is not None
        inputs = 9 * NUM_ACTIONS * (2 + self.by_name * (n - 1)) + 9 * 4
        self.padding = padding(inputs)
        self.layers = nn.ModuleList([StackedLinear(generators, self.padding + inputs, hidden, math.sqrt(2))])
        self.layers.append(StackedLinear(generators, hidden, hidden, math.sqrt(2)))
        # One head for each action of the player's own: a bystander is not mistaken for one of the party that it stands among.
        self.outcome_head = StackedLinear(generators, hidden, NUM_ACTIONS * 6, 0.01)
        self.prey_head = StackedLinear(generators, hidden, 1, 0.01)
        self.reward_head = StackedLinear(generators, hidden, NUM_ACTIONS * len(self.payoffs), 0.01)

    def table(self, name, values, dtype=torch.int64):
        self.register_buffer(name, torch.tensor(values, dtype=dtype), persistent=False)

    def read(self, board):
        """uint8 [M, B, C, H, W] -> planes [M, B, C, H*W], cell [M, B, N], present [M, B, N]"""
        planes = board.flatten(3)
        players = planes[:, :, : self.config.num_players]
        return planes, players.argmax(3), players.amax(3) > 0

    def forward(self, board, joint):
        """board uint8 [M, B, C, H, W] and joint action [M, B, N], both in the observer's ego order -> logits of each player's
        outcome [M, B, N, 6], of the prey on its cell being taken [M, B, N], of the observer's payoff [M, B, R]"""
        n = self.config.num_players
        planes, cell, present = self.read(board)
        both = present[..., None] & present[..., self.order]
        near = self.near[cell[..., None], cell[..., self.order]]  # [M, B, N, N]
        code = torch.where(both & (near < 9), near * NUM_ACTIONS + joint.long()[..., self.order], -1)
        own, *others = ((part[..., None] == self.codes).float() for part in code.unbind(3))  # each [M, B, N, 63]
        fixed = F.pad(planes[:, :, n:].float(), (0, 1, 0, 1))  # walls, stags, hares and one plane more; one cell more
        fixed[:, :, 3, :-1] = 1.0  # the board itself
        around = self.around[cell].flatten(2)  # [M, B, N * 9]
        patch = fixed.gather(3, around[:, :, None].expand(-1, -1, 4, -1)).unflatten(3, (n, 9)).transpose(2, 3)
        nothing = patch.new_zeros(()).expand(*cell.shape, self.padding)
        x = torch.cat([nothing, own, sum(others), patch.flatten(3), *others * self.by_name], 3)  # [M, B, N, inputs]
        for layer in self.layers:
            x = F.relu(layer(x))
        walls = F.pad(planes[:, :, n], (0, 1), value=1)
        blocked = walls.gather(2, self.target[cell].flatten(2)).view(*cell.shape, 5) > 0
        no_prey = planes[:, :, n + 1 :].amax(2).gather(2, cell) == 0  # nobody leaves from here
        blocked = torch.cat([blocked, no_prey[..., None]], 3)
        outcome = self.by_action(self.outcome_head(x), joint).masked_fill(blocked, -1e9)
        return outcome, self.prey_head(x).squeeze(3), self.by_action(self.reward_head(x[:, :, 0]), joint[:, :, 0])

    @staticmethod
    def by_action(logits, action):  # [..., 7 * outputs] -> [..., outputs]
        logits = logits.unflatten(-1, (NUM_ACTIONS, -1))
        index = action.long()[..., None, None].expand(*action.shape, 1, logits.shape[-1])
        return logits.gather(-2, index).squeeze(-2)

    def loss(self, board, joint, next_board, reward, weight):
        """[M]: the mean over the B boards, weighted by weight [M, B]"""
        n = self.config.num_players
        outcome, taken, payoff = self(board, joint)
        planes, cell, present = self.read(board)
        next_planes, next_cell, next_present = self.read(next_board)
        goes = torch.where(next_present, self.outcome[cell, next_cell], 5)
        prey, next_prey = (p[:, :, n + 1 :].amax(2).gather(2, cell).float() for p in (planes, next_planes))
        goes_loss = F.cross_entropy(outcome.movedim(3, 1), goes, reduction="none") * present
        taken_loss = F.binary_cross_entropy_with_logits(taken, prey - next_prey, reduction="none") * prey * present
        paid = (reward[..., None] - self.payoffs).abs().argmin(2)
        paid_loss = F.cross_entropy(payoff.movedim(2, 1), paid, reduction="none")
        return (((goes_loss + taken_loss).sum(2) + paid_loss) * weight).sum(1) / weight.sum(1).clamp(min=1)

    @torch.no_grad()
    def predict(self, board, joint, with_raw: bool = True) -> Prediction:
        n, cells = self.config.num_players, self.config.num_cells
        outcome, taken, payoff = self(board, joint)
        planes, cell, present = self.read(board)
        goes = torch.where(present, outcome.argmax(3), 5)
        goal = self.target[cell].gather(3, goes.clamp(max=4)[..., None])[..., 0]
        players = self.one_hot[torch.where(goes < 5, goal, cells)]
        here = self.one_hot[torch.where(present, cell, cells)]
        lost = (taken.sigmoid()[..., None] * here).amax(2, keepdim=True)  # [M, B, 1, H*W]
        prey = planes[:, :, n + 1 :].float()
        walls = planes[:, :, n : n + 1].float()
        new = torch.cat([players, walls, prey * (lost <= 0.5)], 2).to(torch.uint8).view(board.shape)
        raw = None
        if with_raw:
            places = self.one_hot[self.target[cell]]  # [M, B, N, 5, H*W]
            raw_players = ((outcome.softmax(3) * present[..., None])[..., :5, None] * places).sum(3)
            raw = torch.cat([raw_players, walls, prey * (1 - lost)], 2).view(board.shape)
        return Prediction(new, raw, self.payoffs[payoff.argmax(2)])


class PixelWorldModel(nn.Module):
    """The notes' head: an MLP that predicts every cell of every plane and the reward by mean squared error."""

    def __init__(self, config: StagHuntConfig, generators: list[torch.Generator], hidden: int, channel_weights=None):
        super().__init__()
        self.config = config
        size = math.prod(config.observation_shape)
        weights = torch.tensor(channel_weights or [1.0] * config.observation_shape[0]).view(-1, 1, 1)
        self.register_buffer("channel_weights", weights, persistent=False)
        self.layers = nn.ModuleList()
        for inputs in (size + NUM_ACTIONS * config.num_players, 2 * hidden, 2 * hidden):
            self.layers.append(StackedLinear(generators, inputs, 2 * hidden, math.sqrt(2)))
        self.head = StackedLinear(generators, 2 * hidden, size + 1)

    def forward(self, board, joint):
        x = torch.cat([board.flatten(2).float(), F.one_hot(joint.long(), NUM_ACTIONS).flatten(2).float()], 2)
        for layer in self.layers:
            x = F.relu(layer(x))
        x = self.head(x)
        return x[..., :-1].view(board.shape), x[..., -1]

    def loss(self, board, joint, next_board, reward, weight):
        raw, paid = self(board, joint)
        squared = (raw - next_board.float()).square() * self.channel_weights
        each = squared.mean((3, 4)).sum(2) + (paid - reward).square()
        return (each * weight).sum(1) / weight.sum(1).clamp(min=1)

    @torch.no_grad()
    def predict(self, board, joint, with_raw: bool = True) -> Prediction:
        raw, paid = self(board, joint)
        return Prediction((raw > 0.5).to(torch.uint8), raw, paid)


def make_world_model(args: Args, config: StagHuntConfig, num_models: int, seeds: list[int], device) -> nn.Module:
    members = num_models // len(seeds)
    generators = [torch.Generator().manual_seed(1000 * seed + member) for seed in seeds for member in range(members)]
    if args.wm_head == "structured":
        return WorldModel(config, generators, args.wm_hidden).to(device)
    return PixelWorldModel(config, generators, args.wm_hidden, args.wm_channel_weights).to(device)


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


class Transitions(NamedTuple):
    board: torch.Tensor  # uint8 [..., C, H, W]
    joint: torch.Tensor  # uint8 [..., N] ego order
    next_board: torch.Tensor
    reward: torch.Tensor  # [...]
    clock: torch.Tensor  # int32 [...] before the step
    ended: torch.Tensor  # bool [...] the game ended with the step


def views(env: StagHuntEnv, games: Games) -> tuple[torch.Tensor, torch.Tensor]:
    """boards uint8 [G, T + 1, N, C, H, W] and joint actions uint8 [G, T, N, N], seen by each player"""
    num_games, steps = games.actions.shape[:2]
    boards = env.observe(State(*(x.flatten(0, 1) for x in games.states))).unflatten(0, (num_games, steps + 1))
    return boards, env.seats_to_ego(games.actions.flatten(0, 1)).unflatten(0, (num_games, steps))


def transitions(env: StagHuntEnv, games: Games, limit: int | None = None) -> Transitions:
    """Those of all players that were on the board, game after game; the first `limit`."""
    boards, joint = views(env, games)
    over = env.game_over(State(*(x.flatten(0, 1) for x in games.states))).view(boards.shape[:2])
    each = [x[..., None].expand_as(games.acted) for x in (games.states.time[:, :-1], over[:, 1:])]
    fields = boards[:, :-1], joint, boards[:, 1:], games.reward, *each
    return Transitions(*(x[games.acted][:limit] for x in fields))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def predict(model: nn.Module, board, joint, size: int = 2048) -> Prediction:
    parts = [model.predict(b, j) for b, j in zip(board.split(size, 1), joint.split(size, 1), strict=True)]
    return Prediction(*(torch.cat(x, 1) for x in zip(*parts, strict=True)))


def possible(config: StagHuntConfig, board, new, reward) -> torch.Tensor:
    """bool [...]: is each player within one step, or gone from a cell with prey, no prey new, no wall moved, the reward one
    that the game pays? Whether these fit together is not asked; exact_match asks it."""
    n = config.num_players
    height, width = board.shape[-2:]
    old, new = board.float(), new.float()
    padded = F.pad(old[..., :n, :, :], (1, 1, 1, 1))
    corners = (1, 1), (0, 1), (2, 1), (1, 0), (1, 2)  # stay, and the four moves
    reach = sum(padded[..., top : top + height, left : left + width] for top, left in corners)
    free = 1 - old[..., n : n + 1, :, :]
    players = (new[..., :n, :, :] <= reach * free).flatten(-3).all(-1) & (new[..., :n, :, :].sum((-2, -1)) <= 1).all(-1)
    prey_here = (old[..., :n, :, :] * old[..., n + 1 :, :, :].amax(-3, keepdim=True)).sum((-2, -1)) > 0
    gone = (old[..., :n, :, :].sum((-2, -1)) > 0) & (new[..., :n, :, :].sum((-2, -1)) == 0)
    players &= (prey_here | ~gone).all(-1)
    walls = (new[..., n, :, :] == old[..., n, :, :]).flatten(-2).all(-1)
    prey = (new[..., n + 1 :, :, :] <= old[..., n + 1 :, :, :]).flatten(-3).all(-1)
    payoffs = torch.tensor(list(config.payoffs()), device=board.device)
    return players & walls & prey & ((reward[..., None] - payoffs).abs().amin(-1) < 1e-4)


def events_of(config: StagHuntConfig, reward) -> torch.Tensor:
    """int [...]: which of EVENTS the nearest payoff belongs to"""
    payoffs = config.payoffs()
    kinds = torch.tensor([EVENTS.index(kind) for kind in payoffs.values()], device=reward.device)
    return kinds[(reward[..., None] - torch.tensor(list(payoffs), device=reward.device)).abs().argmin(-1)]


def one_step_metrics(config: StagHuntConfig, data: Transitions, p: Prediction) -> list[dict[str, float]]:
    """One dict per model."""
    squared = (p.raw - data.next_board.float()).square()
    channel = squared.mean((1, 3, 4))  # [M, C]
    mse = channel.mean(1)
    exact = (p.board == data.next_board).flatten(2).all(2)
    nobody = p.board[:, :, : config.num_players].flatten(2).amax(2) == 0
    ended = nobody | (data.clock + 1 >= config.final_time)
    true_event, event = events_of(config, data.reward), events_of(config, p.reward)
    columns = {
        "exact_match": exact.float().mean(1),
        "obs_mse": mse,
        "obs_psnr": -10 * mse.clamp(min=1e-20).log10(),
        "reward_mse": (p.reward - data.reward).square().mean(1),
        "end_accuracy": (ended == data.ended).float().mean(1),
        "possible_boards": possible(config, data.board, p.board, p.reward).float().mean(1),
    }
    for c in range(channel.shape[1]):
        columns[f"per_channel_mse/{c}"] = channel[:, c]
    for number, name in enumerate(EVENTS):
        hit = ((event == number) & (true_event == number)).sum(1)
        columns[f"reward_precision/{name}"] = hit / (event == number).sum(1)
        columns[f"reward_recall/{name}"] = hit / (true_event == number).sum(1)
    return [{key: float(values[m]) for key, values in columns.items()} for m in range(len(mse))]


def steps_ahead(env: StagHuntEnv, model: nn.Module, games: list[Games], limit: int = 2000) -> dict[int, torch.Tensor]:
    """k -> share [M] of exact boards after k steps of the model on its own boards, given the actions that were played.
    One list entry per seed; only rollouts in which the observer is on the board until the last step."""
    boards, joints = zip(*(views(env, g) for g in games), strict=True)
    members = model_count(model) // len(games)
    shares = {}
    for k in STEPS_AHEAD:
        starts = []
        for g in games:
            found = g.acted[:, k - 1 :].nonzero()  # [_, (game, t, observer)], on the board still at t + k - 1
            number = torch.arange(min(limit, len(found)), device=found.device)
            place = number * (len(found) - 1) // max(1, len(number) - 1)  # in integers: the same on every machine
            starts.append(found[place])
        count = min(len(s) for s in starts)
        if count == 0:
            continue
        at = [s[:count].unbind(1) for s in starts]
        board = torch.stack([b[g, t, i] for b, (g, t, i) in zip(boards, at, strict=True)]).repeat_interleave(members, 0)
        for step in range(k):
            joint = torch.stack([j[g, t + step, i] for j, (g, t, i) in zip(joints, at, strict=True)])
            board = predict(model, board, joint.repeat_interleave(members, 0)).board
        truth = torch.stack([b[g, t + k, i] for b, (g, t, i) in zip(boards, at, strict=True)]).repeat_interleave(members, 0)
        shares[k] = (board == truth).flatten(2).all(2).float().mean(1)
    return shares


def model_count(model: nn.Module) -> int:
    return next(model.parameters()).shape[0]


def measure(model, env: StagHuntEnv, games: list[Games], held_out: Transitions, ahead: bool) -> list[dict[str, float]]:
    """One dict per seed: the mean over the ensemble's members, and how often these disagree."""
    members = model_count(model) // len(games)
    data = Transitions(*(x.repeat_interleave(members, 0) for x in held_out))
    p = predict(model, data.board, data.joint)
    rows = one_step_metrics(env.config, data, p)
    for k, share in (steps_ahead(env, model, games) if ahead else {}).items():
        for row, value in zip(rows, share.tolist(), strict=True):
            row[f"exact_match/{k}"] = value
    seeds = [rows[s * members : (s + 1) * members] for s in range(len(games))]
    result = [{key: interval([row[key] for row in group])[0] for key in group[0]} for group in seeds]
    if members > 1:
        boards = p.board.unflatten(0, (len(games), members))
        differ = (boards != boards[:, :1]).flatten(3).any(3).any(1)  # [S, B]
        right = (boards[:, 0] == held_out.next_board).flatten(2).all(2)
        for s, row in enumerate(result):
            row["disagreement"] = float(differ[s].float().mean())
            row["exact_match_when_agreed"] = float(right[s][~differ[s]].float().mean())
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Tables and pictures


def interval(values: list[float]) -> tuple[float, float]:
    """mean and half width of its 95 % interval (Student's t over seeds)"""
    values = [v for v in values if not math.isnan(v)]
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    from scipy import stats  # takes half a second to load

    t = float(stats.t.ppf(0.975, len(values) - 1))
    return float(np.mean(values)), t * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def write_table(path: Path, rows: list[dict[str, float]], seeds: list[int]) -> str:
    """A CSV with one line per metric, and the same as text."""
    lines = []
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["metric", "mean", "half_width_95", *(f"seed_{seed}" for seed in seeds)])
        for key in rows[0]:
            values = [row[key] for row in rows]
            mean, half = interval(values)
            writer.writerow([key, mean, half, *values])
            lines.append(f"{key:<28}{mean:>14.6g}" + (f" ± {half:.2g}" if not math.isnan(half) else ""))
    return "\n".join(lines)


@contextlib.contextmanager
def surviving(what: str):
    """A picture must never cost a run: whatever fails in here is told in one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        print(f"could not {what}: {type(error).__name__}: {reason}; the run goes on", flush=True)


def draw_cases(path: Path, config: StagHuntConfig, data: Transitions, p: Prediction, cases: list[int]) -> None:
    """Each case is a row: the board, the true next one, the predicted one with its raw values, the error."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n = config.num_players
    names = [*(f"{k}" for k in range(n)), "W", "S", "h"]
    colours = ["#d64541", "#3478c8", "#b8860b", "#8255b4", "#1ea096", "#eb7832", "#dc5a96", "#5a5a64"][:n]
    colours += ["#444444", "#6e4623", "#888888"]
    figure, axes = plt.subplots(
        len(cases), 4, figsize=(13, len(cases) * (0.4 + 3.1 * config.height / config.width)), squeeze=False
    )
    for axis_row, case in zip(axes, cases, strict=True):
        board, truth, raw = data.board[0, case].cpu(), data.next_board[0, case].cpu(), p.raw[0, case].cpu()
        actions = ", ".join(f"{k} {ACTION_NAMES[int(a)]}" for k, a in enumerate(data.joint[0, case]))
        titles = f"board; {actions}", f"true next; reward {float(data.reward[0, case]):.3g}"
        titles = *titles, f"predicted (raw); reward {float(p.reward[0, case]):.3g}", "largest error in the cell"
        error = (raw - truth.float()).abs().amax(0)
        for axis, title, planes in zip(axis_row, titles, (board, truth, raw, None), strict=True):
            shade = (error if planes is None else 0.4 * board[n].float()).numpy()  # walls are grey
            axis.imshow(shade, cmap="Reds" if planes is None else "Greys", vmin=0, vmax=1)
            axis.set_title(title, fontsize=8)
            axis.set(xticks=[], yticks=[])
            for x in range(1, config.width):
                axis.axvline(x - 0.5, color="#bbbbbb", linewidth=1)
            for y in range(1, config.height):
                axis.axhline(y - 0.5, color="#bbbbbb", linewidth=1)
            for y in range(config.height):
                for x in range(config.width):
                    if planes is None:
                        axis.text(
                            x,
                            y,
                            f"{float(error[y, x]):.1g}" if error[y, x] > 1e-4 else "0",
                            ha="center",
                            va="center",
                            fontsize=7,
                        )
                        continue
                    shown = [
                        (c, float(planes[c, y, x]))
                        for c in range(len(names))
                        if c != n and abs(float(planes[c, y, x])) > 0.005
                    ]
                    for line, (c, value) in enumerate(shown[:6]):
                        text = names[c] if planes.dtype == torch.uint8 else f"{names[c]} {value:.2f}"
                        place = y + 0.16 * (line - (min(len(shown), 6) - 1) / 2)
                        axis.text(x, place, text, ha="center", va="center", fontsize=7, color=colours[c], fontweight="bold")
    figure.tight_layout()
    figure.savefig(path, dpi=60)
    plt.close(figure)


def draw_summary(folder: Path, config: StagHuntConfig, data: Transitions, p: Prediction, row: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [*(f"player {k}" for k in range(config.num_players)), "walls", "stags", "hares"]
    for kind in ("histogram", "scatter"):
        figure, axes = plt.subplots(2, math.ceil(len(names) / 2), figsize=(13, 5.5), squeeze=False)
        for c, axis in enumerate(axes.flat):
            if c >= len(names):
                axis.axis("off")
                continue
            raw, truth = (x[0, :2000, c].flatten().cpu().numpy() for x in (p.raw, data.next_board))
            if kind == "histogram":
                edges = np.linspace(min(-0.05, raw.min()), max(1.05, raw.max()), 41)
                colours, parts = ["#9aa5b1", "#d64541"], [raw[truth == 0], raw[truth == 1]]
                axis.hist(parts, edges, label=["truly 0", "truly 1"], color=colours)
                axis.set_yscale("log")
            else:
                jitter = np.random.default_rng(0).uniform(-0.2, 0.2, len(truth))
                axis.scatter(truth + jitter, raw, s=2, alpha=0.2, rasterized=True)
                axis.set_xticks([0, 1])
            axis.set_title(names[c], fontsize=9)
        if kind == "histogram":
            axes.flat[0].legend(fontsize=7)
        figure.suptitle("predicted value of a cell: " + ("counts" if kind == "histogram" else "true (x), predicted (y)"))
        figure.tight_layout()
        figure.savefig(folder / f"calibration_{kind}.png", dpi=70)
        plt.close(figure)
    figure, axis = plt.subplots(figsize=(5, 3.2))
    ahead = [k for k in STEPS_AHEAD if f"exact_match/{k}" in row]
    axis.plot(ahead, [row[f"exact_match/{k}"] for k in ahead], marker="o")
    axis.set(xlabel="steps on the model's own boards", ylabel="boards exactly right", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "steps_ahead.png", dpi=80)
    plt.close(figure)


def report(args: Args, env, model, games, held_out, seeds, folders: list[Path]) -> list[dict[str, float]]:
    """The full measurement: printed, written as CSV, drawn."""
    rows = measure(model, env, games, held_out, ahead=True)
    text = write_table(folders[0] / "evaluation.csv", rows, seeds)
    print(f"{args.wm_head} head, {env.config.setting}, {len(seeds)} seed(s), held-out games; pictures and CSV in {folders[0]}")
    print(text)
    members = model_count(model) // len(games)
    for s, folder in enumerate(folders):
        data = Transitions(*(x[s : s + 1, :4000] for x in held_out))
        board, joint = (x.expand(model_count(model), *x.shape[1:]) for x in (data.board, data.joint))
        p = Prediction(*(x[s * members : s * members + 1] for x in predict(model, board, joint)))
        worst = (p.raw - data.next_board.float()).square().flatten(2).sum(2)[0] + (p.reward - data.reward)[0].abs()
        with surviving("draw"):
            draw_cases(folder / "cases_worst.png", env.config, data, p, worst.argsort(descending=True)[:4].tolist())
            draw_cases(folder / "cases_random.png", env.config, data, p, [k * len(worst) // 4 for k in range(4)])
            draw_summary(folder, env.config, data, p, rows[s])
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def clip_per_model(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clips the gradient of each of the M stacked models by its own norm; returns the norms [M]."""
    norms = torch.cat([p.grad.flatten(1) for p in parameters], 1).norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for p in parameters:
        p.grad.mul_(factor.view(-1, *[1] * (p.dim() - 1)))
    return norms


def train(args: Args, model, optimiser, data: Transitions, generators, first: int, last: int) -> torch.Tensor:
    """Updates `first` to `last`, minibatches drawn by each seed's own generator; returns their mean loss [M]."""
    num_models, (num_seeds, size), device = model_count(model), data.board.shape[:2], data.board.device
    seed_of = torch.arange(num_seeds, device=device).repeat_interleave(num_models // num_seeds)[:, None]
    total, shape = torch.zeros(num_models, device=device), (num_models // num_seeds, args.batch_size)
    weight = torch.ones(num_models, args.batch_size, device=device)
    for update in range(first, last):
        for group in optimiser.param_groups:
            group["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * update / args.num_updates))
        index = torch.cat([torch.randint(size, shape, generator=generator, device=device) for generator in generators])
        loss = model.loss(*(x[seed_of, index] for x in data[:4]), weight)
        optimiser.zero_grad(set_to_none=True)
        loss.sum().backward()
        clip_per_model(list(model.parameters()), args.max_grad_norm)
        optimiser.step()
        total += loss.detach()
    return total / (last - first)


def checked(args: Args) -> StagHuntConfig:
    """Refuses wrong flags before anything is written."""
    config = args.config.checked()
    resolve_device(args.device)
    check_players(args.players)
    if not args.players:
        raise ValueError("--players needs at least one name")
    for name in (
        "num_seeds",
        "num_transitions",
        "held_out_games",
        "wm_hidden",
        "wm_ensemble",
        "num_updates",
        "log_every",
        "batch_size",
    ):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, not {getattr(args, name)}")
    for name in ("learning_rate", "max_grad_norm"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be a positive number, not {getattr(args, name)}")
    if Path(args.run_dir).exists() and not Path(args.run_dir).is_dir():
        raise ValueError(f"--run-dir {args.run_dir} is not a folder")
    if config.prosocial and args.wm_head == "structured":
        raise ValueError(
            "--prosocial rewards depend on the whole board, which the structured head does not see: --wm-head pixel"
        )
    planes = config.observation_shape[0]
    if args.wm_channel_weights is not None and args.wm_head != "pixel":
        raise ValueError("--wm-channel-weights belongs to --wm-head pixel")
    if args.wm_channel_weights is not None and len(args.wm_channel_weights) != planes:
        raise ValueError(f"--wm-channel-weights needs {planes} numbers, one per plane, not {len(args.wm_channel_weights)}")
    if args.evaluate_board is not None and args.evaluate is None:
        raise ValueError("--evaluate-board belongs to --evaluate")
    if args.evaluate is not None and args.resume is not None:
        raise ValueError("--evaluate and --resume exclude each other")
    return config


def args_from(saved: dict, **changes) -> Args:
    return Args(**{**saved, **changes, "config": StagHuntFlags(**saved["config"])})


def main(args: Args) -> dict[str, float]:
    """Returns the final metrics, averaged over seeds."""
    config = checked(args)
    checkpoint = None
    if args.resume or args.evaluate:
        path = args.resume or args.evaluate
        checkpoint = load_file(path, "world-model-3", "world-model checkpoint")
        kept = {name: getattr(args, name) for name in ("resume", "evaluate", "evaluate_board", "device")}
        args = args_from(checkpoint["args"], **kept)
        config = args.config.checked()
        if args.evaluate_board:
            if args.wm_head == "pixel":
                raise ValueError(f"{path} has the pixel head, which knows one board size: {config.height}x{config.width}")
            height, width = parse_board(args.evaluate_board)
            config = dataclasses.replace(config, height=height, width=width)
    device = resolve_device(args.device)
    if args.resume and checkpoint["device"] != device.type:
        raise ValueError(
            f"{args.resume} is a run on {checkpoint['device']}: it cannot be continued bit for bit on {device.type}"
        )
    started = time.time()
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    env = StagHuntEnv(config, 1, device, args.seed)
    if args.data and not args.evaluate:
        games = load_games(args.data, config, args.players, args.num_seeds, device)
    else:
        games = [collect(config, args.players, s, args.num_transitions, args.held_out_games, device) for s in seeds]
    if args.save_data and not args.evaluate:
        save_games(args.save_data, config, args.players, games)
    smallest = min(int(pair[0].acted.sum()) for pair in games)
    if smallest < args.num_transitions:
        raise ValueError(f"{args.data} holds {smallest} transitions to train on, {args.num_transitions} are asked for")
    held_out = [transitions(env, pair[1]) for pair in games]
    count = min(len(t.board) for t in held_out)
    held_out = Transitions(*(torch.stack([t[:count] for t in field]) for field in zip(*held_out, strict=True)))
    model = make_world_model(args, config, args.num_seeds * args.wm_ensemble, seeds, device)
    if args.evaluate:
        model.load_state_dict(checkpoint["model"])
        folders = [Path(args.evaluate).parent / f"evaluation_{config.setting}" / f"seed_{s}" for s in seeds]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        rows = report(args, env, model, [pair[1] for pair in games], held_out, seeds, folders)
        return {key: interval([row[key] for row in rows])[0] for key in rows[0]}

    data = [transitions(env, pair[0], args.num_transitions) for pair in games]
    data = Transitions(*(torch.stack(field) for field in zip(*data, strict=True)))
    watched = Transitions(*(x[:, :10_000] for x in held_out))
    optimiser = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    done, spent = 0, 0.0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimiser.load_state_dict(checkpoint["optimiser"])
        for generator, state in zip(generators, checkpoint["generators"], strict=True):
            generator.set_state(state)
        done, folders, spent = checkpoint["updates"], [Path(f) for f in checkpoint["folders"]], checkpoint["seconds"]
        for folder in folders:
            keep_lines(folder / "metrics.jsonl", "update", done)
    else:
        stamp = int(time.time())
        while any(Path(args.run_dir).glob(f"*__{stamp}")):  # another run began in the same second
            stamp += 1
        folders = [Path(args.run_dir) / f"{args.exp_name}__{config.setting}_{args.wm_head}__{s}__{stamp}" for s in seeds]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=2) + "\n")
    writers = [SummaryWriter(folder, purge_step=done + 1) for folder in folders]
    print(
        f"{config.setting}, {args.wm_head} head, {args.num_transitions} transitions, {model_count(model)} model(s) on {device}"
    )
    print(f"data ready after {time.time() - started:.1f} s; run folder {folders[0]}", flush=True)

    def save(name="checkpoint.pt"):
        saved_args = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("resume", "evaluate", "evaluate_board")}
        content = {
            "format": "world-model-3",
            "args": saved_args,
            "model": model.state_dict(),
            "optimiser": optimiser.state_dict(),
        }
        content |= {
            "generators": [generator.get_state() for generator in generators],
            "updates": done,
            "device": device.type,
            "seconds": spent + time.time() - started,
        }
        save_atomically(folders[0] / name, content | {"folders": [str(f) for f in folders]})

    bar = tqdm(initial=done, total=args.num_updates, unit="update", mininterval=1)
    while done < args.num_updates:
        last = min(done + args.log_every, args.num_updates)
        loss = train(args, model, optimiser, data, generators, done, last).tolist()
        bar.update(last - done)
        done = last
        if not all(math.isfinite(x) for x in loss):
            save("checkpoint_bad.pt")
            raise FloatingPointError(f"losses/world_model is {loss} at update {done}; see {folders[0]}/checkpoint_bad.pt")
        rows = measure(model, env, [pair[1] for pair in games], watched, ahead=False)
        for s, (row, folder, writer) in enumerate(zip(rows, folders, writers, strict=True)):
            row = {"loss": float(np.mean(loss[s * args.wm_ensemble : (s + 1) * args.wm_ensemble])), **row}
            with surviving("write to TensorBoard"):
                for key, value in row.items():
                    writer.add_scalar("losses/world_model" if key == "loss" else f"wm/{key}", value, done)
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"update": done, **finite(row)}) + "\n")
        bar.set_postfix_str(f"loss {np.mean(loss):.4g}, exact match {np.mean([row['exact_match'] for row in rows]):.4%}")
        save()
    bar.close()

    rows = report(args, env, model, [pair[1] for pair in games], held_out, seeds, folders)
    for row, folder, writer in zip(rows, folders, writers, strict=True):
        with surviving("write to TensorBoard"):
            for key, value in row.items():
                writer.add_scalar(f"wm_final/{key}", value, done)
            for picture in sorted(folder.glob("*.png")):
                writer.add_image(picture.stem, read_picture(picture), done, dataformats="HWC")
            writer.close()
    print(f"{spent + time.time() - started:.1f} s in all; checkpoint {folders[0]}/checkpoint.pt")
    return {
        "checkpoint": str(folders[0] / "checkpoint.pt"),
        **{key: interval([row[key] for row in rows])[0] for key in rows[0]},
    }


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
