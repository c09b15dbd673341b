"""Stag Hunt: hunters on a grid choose between a stag that takes two and a hare that takes one.

    python stag_hunt_env.py [--gif FILE]    # watch a game in the terminal (and write it to a GIF)

Hunters (seats), stags and hares stand on a `height` x `width` board. Prey do not move, hunters
do not block each other, and all act at the same moment. An illegal action acts as stay.

* 0 to 3, up, down, left, right: to the next cell, if it has no wall.
* 4, stay: always legal, and all that is legal for those who left.
* 5, hunt stag, on the cell of a living stag: 2 or more get `stag_reward` and leave with the stag.
* 6, hunt hare, on the cell of a living hare: 1 or more get `hare_reward` and leave with the hare.

A party shares its reward equally. The game ends when everyone has left, at `final_time`, or
`steps_after_first_hunt` steps after the first catch. Players see the clock, so each of these is a
true end: never bootstrap from the state after it. At reset up to `max_wall_pieces` walls of 3 or 4
cells are laid, straight or L-shaped; one that would overlap, cut the free cells in two or leave too
little room is left out.

A player sees the clock `time / final_time` and uint8 planes `[num_players + 3, height, width]` of
zeros and ones, in its **ego order**: plane k < num_players shows player i seat (i + k) mod
num_players, until that player leaves. Walls, living stags and living hares follow.

Rule-based players are `random` (uniform over the legal actions); `nearest_stag` and `nearest_hare`
(a shortest path to such prey, then hunts it); `first_stag` and `last_stag` (the same with the
living stag of the lowest or highest cell number). Strangers belong to no population that learners
train with: `noisy_stag` and `noisy_hare` (one action in five as `random`); `waiting` (walks to the
nearest stag and stays there); `left_stag` (hunts the living stag that is farthest to the left, of
several the nearest); `switching` (`nearest_stag` in one game, `nearest_hare` in the next).
With no such prey left they act as `random`; `waiting` stays.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import operator
import os
import random
import re
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, NoReturn, get_args, get_type_hints

IMPORTS_BEGAN = time.perf_counter()


def report_uncaught(kind, error, trace, report=sys.excepthook):
    """Ctrl-C while the imports are under way: no traceback"""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    else:
        report(kind, error, trace)


sys.excepthook = report_uncaught

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from pettingzoo import ParallelEnv
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

IMPORT_SECONDS = time.perf_counter() - IMPORTS_BEGAN

UP, DOWN, LEFT, RIGHT, STAY, HUNT_STAG, HUNT_HARE = range(7)
ACTION_NAMES = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")
NUM_ACTIONS = 7
FAR = 1 << 20  # a distance that no board has: there is no such prey
ALL_SEATS = slice(None)

MOST = 1e38  # torch counts in float32
LEAST = math.ulp(0.0)
Reward = Annotated[float, ("-1e6 to 1e6", -1e6, 1e6)]
Positive = Annotated[float, ("> 0", LEAST, MOST)]
NonNegative = Annotated[float, (">= 0", 0, MOST)]
Fraction = Annotated[float, ("0 to 1", 0, 1)]
Count = Annotated[int, (">= 1", 1, 10**15)]
Whole = Annotated[int, (">= 0", 0, 10**15)]
Names = str | list[str] | tuple[str, ...]  # "a,b" or ["a", "b"]


class UserError(ValueError):
    """A sentence for the user, shown without a traceback"""


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise UserError(message)


def check_ranges(args) -> None:
    """Refuses the first field whose value is outside the range that its type names; also NaN and inf"""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        for part in (hint, *get_args(hint)):  # in `Count | None` the range hides inside the union
            for wanted, low, high in getattr(part, "__metadata__", ()):
                if value is None or low <= value <= high:
                    continue
                if wanted.startswith(">") and high < value < math.inf:
                    wanted = f"at most {high:g}"
                raise UserError(f"--{name.replace('_', '-')} must be {wanted}, not {value}")


@dataclasses.dataclass(frozen=True)
class StagHuntConfig:
    height: Count = 4  # rows of the board
    width: Count = 4  # columns of the board
    num_players: Annotated[int, ("2 to 8", 2, 8)] = 4  # seats, 2 to 8
    num_stags: Whole = 1  # stags at the start
    num_hares: Whole = 4  # hares at the start
    final_time: Count = 35  # steps until the game ends
    stag_reward: Reward = 10.0  # paid for a stag, shared by the party
    hare_reward: Reward = 1.0  # paid for a hare, shared by the party
    max_wall_pieces: Whole = 0  # wall pieces tried at each reset
    steps_after_first_hunt: Whole | None = None  # end the game this many steps after the first catch (None: do not)
    permute_ids: bool = False  # deal the starting cells to the seats again, in random order, at every reset

    def __post_init__(self):
        check_ranges(self)
        cells = self.num_cells
        players = self.num_players
        walls = self.max_wall_pieces
        needed = self.num_prey + players
        board = f"--height {self.height} --width {self.width}"
        refuse(needed > cells, f"{board}: too little room: {needed} prey and players, {cells} cells")
        refuse(walls > cells, f"--max-wall-pieces {walls} is more than the board has cells, {cells}")

    @property
    def num_prey(self) -> int:
        return self.num_stags + self.num_hares

    @property
    def num_cells(self) -> int:
        return self.height * self.width

    @property
    def num_wall_cells(self) -> int:
        """As how many numbers scripts keep the walls: one 0 where there are none"""
        return self.num_cells if self.max_wall_pieces else 1

    @property
    def observation_shape(self) -> tuple[int, int, int]:
        return self.num_players + 3, self.height, self.width

    @property
    def setting(self) -> str:
        """4x4_4h1s is 4 hunters and 1 stag; hares are named where there are not 4"""
        hares = "" if self.num_hares == 4 else f"_{self.num_hares}hares"
        return f"{self.height}x{self.width}_{self.num_players}h{self.num_stags}s{hares}"

    @cache  # noqa: B019, a run has one config
    def payoffs(self) -> dict[float, str]:
        """Every reward that a player on the board can get in one step -> none, hare or stag paid it"""
        hares = []
        stags = []
        for size in range(1, self.num_players + 1):
            if self.num_hares:
                hares.append((self.hare_reward / size, "hare"))
            if self.num_stags and size > 1:
                stags.append((self.stag_reward / size, "stag"))
        payoffs = [(0.0, "none"), *hares, *stags]
        payoffs.reverse()  # of equal rewards the first counts
        return {float(np.float32(reward)): paid for reward, paid in payoffs}


class State(NamedTuple):
    """B games. Cells are numbered row by row. A state with walls belongs to a config with max_wall_pieces > 0."""

    position: Tensor  # [B, N] the cell of each seat; where it last stood once it has left
    present: Tensor  # [B, N] still on the board
    prey_position: Tensor  # [B, P] stags first
    prey_alive: Tensor  # [B, P]
    walls: Tensor  # [B, H*W] uint8, 1 where a wall stands
    time: Tensor  # [B] steps played
    first_hunt: Tensor  # [B] the clock right after the first catch, -1 before


class StagHuntEnv:
    """`num_envs` games on one device. `initial_state`, `transition`, `observe`, ... are functions of
    a state. `step` plays on from `state`, in place: a game that ends is replaced at once, and leaves
    `final_state`, `final_return` and `final_prey` [B, N] and `final_length` [B] until the next one
    ends there. To keep a state, take `copy_state`. `step` can be captured in a CUDA graph (register
    `generator` with it); `compile=True` fuses it with torch.compile."""

    def __init__(self, config: StagHuntConfig | None = None, num_envs=1, device="cpu", seed=0, compile=False):
        refuse(num_envs < 1, f"num_envs must be >= 1, not {num_envs}")
        self.config = config or StagHuntConfig()
        self.device = resolve_device(device)
        self.num_envs = num_envs
        self.generator = torch.Generator(self.device)
        self._make_tables()
        self._prepare_deals()
        if compile:
            self._advance = torch.compile(self._advance, dynamic=False)
            self._refill = torch.compile(self._refill, dynamic=False)
        self.state = self.initial_state()
        self.final_state = self.initial_state()
        self.final_length = self.final_state.time
        self.episode_return = torch.zeros(num_envs, self.config.num_players, device=self.device)
        self.final_return = torch.zeros_like(self.episode_return)
        self._next = self.initial_state()
        self._dealt = torch.tensor(0, device=self.device)  # whose next game is dealt anew first
        self.reset(seed)

    def _make_tables(self):
        """What the board, the seats and the prey say once and for all"""
        config = self.config
        tensor = partial(torch.tensor, device=self.device)

        cell = np.arange(config.num_cells)
        row, column = np.divmod(cell, config.width)
        possible = np.zeros((config.num_cells, NUM_ACTIONS), bool)
        possible[:, UP] = row > 0
        possible[:, DOWN] = row < config.height - 1
        possible[:, LEFT] = column > 0
        possible[:, RIGHT] = column < config.width - 1
        offset = [-config.width, config.width, -1, 1, 0, 0, 0]
        distance = abs(row[:, None] - row) + abs(column[:, None] - column)
        self.possible = tensor(possible)  # [H*W, 7] moves that stay on the board
        self.target = tensor(cell[:, None] + possible * offset)  # [H*W, 7] where they lead
        self.manhattan = tensor(distance, dtype=torch.int32)  # [H*W, H*W]
        self.is_stay = tensor([action == STAY for action in range(NUM_ACTIONS)])
        self.hunt = tensor([-1] * 5 + [HUNT_STAG, HUNT_HARE])

        seat = np.arange(config.num_players)
        self.ego = tensor((seat[:, None] + seat) % config.num_players)  # [observer, k] -> seat
        prey = range(config.num_players, config.num_players + config.num_prey)
        self.view_order = tensor([[*row, *prey] for row in self.ego.tolist()])  # cells in each one's ego order
        self.unego = tensor((seat - seat[:, None]) % config.num_players)  # [observer, seat] -> k

        # Planes are moved in words of 8 cells if possible. The last row: not on the board.
        self.word = torch.int64 if config.num_cells % 8 == 0 else torch.uint8
        one_hot = np.eye(config.num_cells + 1, config.num_cells, dtype=np.uint8)
        self.one_hot = tensor(one_hot).view(self.word)

        hunt_action = [HUNT_STAG] * config.num_stags + [HUNT_HARE] * config.num_hares
        self.hunt_action = tensor(hunt_action, dtype=torch.int64)  # [P]
        is_stag = self.hunt_action == HUNT_STAG
        self.party_needed = 1 + is_stag.long()  # [P]
        self.prey_value = torch.where(is_stag, config.stag_reward, config.hare_reward)  # [P]

    def _prepare_deals(self):
        config = self.config
        if config.max_wall_pieces:
            pieces = wall_placements(config.height, config.width)
            self.pieces = torch.tensor(pieces, device=self.device)  # [placements, H*W]
            # Straight across, and around each piece (one of 4 has a rim of 14 cells)
            longest = config.height + config.width - 2 + 14 * config.max_wall_pieces
            self.longest_path = min(config.num_cells - 1, longest)
        entities = config.num_prey + config.num_players
        order = config.num_players * config.permute_ids
        self._numbers = [config.max_wall_pieces, entities, order]  # random, of one deal
        # The next game of each place is dealt in advance, half of them anew at each step, in turn.
        # Nobody starts on prey, so a game lasts 2 steps or more (unless final_time is 1), and no
        # deal is played twice.
        self.deals_per_step = math.ceil(self.num_envs / min(2, config.final_time))
        constant = () if config.max_wall_pieces else ("walls",)
        self._carried = [name for name in State._fields if name not in constant]
        differs = ("position", "prey_position", "walls")  # from deal to deal
        self._dealt_anew = [name for name in self._carried if name in differs]

    def seats_to_ego(self, x: Tensor) -> Tensor:
        """[B, N, ...] about seats -> [B, N observers, N, ...]: entry (i, k) is about seat (i + k) mod N"""
        return x[:, self.ego]

    def ego_to_seats(self, x: Tensor) -> Tensor:
        """[B, N observers, N, ...] in ego order -> entry (i, j) is what observer i holds about seat j"""
        return x[:, self.ego[:, :1], self.unego]

    def initial_state(self, num_games: int | None = None) -> State:
        """Deals `num_games` (default: num_envs) games with numbers from `generator`."""
        return self._deal(self._uniform(self.num_envs if num_games is None else num_games))

    def _uniform(self, games):
        return torch.rand(games, sum(self._numbers), generator=self.generator, device=self.device)

    def _deal(self, uniform):
        config = self.config
        for_walls, for_cells, for_seats = uniform.split(self._numbers, 1)
        walls = self._lay_walls(for_walls)
        if config.max_wall_pieces:
            free_so_far = (~walls).cumsum(1)
            place = _distinct(for_cells, free_so_far[:, -1:])  # among the free cells
            cells = (free_so_far[:, None] <= place[..., None]).sum(2, dtype=torch.int32)
        else:
            cells = _distinct(for_cells, config.num_cells)
        prey_position = cells[:, : config.num_prey].contiguous()
        position = cells[:, config.num_prey :].contiguous()
        if config.permute_ids:
            position = position.gather(1, _distinct(for_seats, config.num_players).long())
        clock = torch.zeros(len(uniform), dtype=torch.int32, device=self.device)
        return State(
            position=position,
            present=torch.ones_like(position, dtype=torch.bool),
            prey_position=prey_position,
            prey_alive=torch.ones_like(prey_position, dtype=torch.bool),
            walls=walls.to(torch.uint8),
            time=clock,
            first_hunt=clock - 1,
        )

    def _lay_walls(self, uniform):  # [B, pieces] -> bool [B, H*W]
        config = self.config
        walls = torch.zeros(len(uniform), config.num_cells, dtype=torch.bool, device=self.device)
        for k in range(config.max_wall_pieces):
            piece = self.pieces[(uniform[:, k] * len(self.pieces)).long()]
            free = ~(walls | piece)
            reached = free & (free.cumsum(1) == 1)  # from the first free cell
            for _ in range(self.longest_path):
                beside = reached[:, self.target[:, :4]].any(2)
                reached = free & (reached | beside)
            apart = ~(walls & piece).any(1)
            room = free.sum(1) >= config.num_prey + config.num_players
            fits = apart & room & (reached == free).all(1)
            walls = torch.where(fits[:, None], ~free, walls)
        return walls

    def legal_actions(self, state: State) -> Tensor:
        """bool [B, N, 7]"""
        target = self.target[state.position]  # [B, N, 7]
        free = state.walls.gather(1, target.flatten(1)).view(target.shape) == 0
        move = self.possible[state.position] & free & state.present[..., None]
        hunt = (self._on_prey(state) * self.hunt_action).sum(2)  # of what stands on the cell; or 0
        return move | self.is_stay | (self.hunt == hunt[..., None])

    def _on_prey(self, state):  # [B, N, P]
        here = state.position[..., None] == state.prey_position[:, None]
        return here & state.prey_alive[:, None] & state.present[..., None]

    def transition(self, state: State, actions: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
        """actions int [B, N] -> next state, reward [B, N], present_before [B, N] (acted in this step),
        done [B]. No reset: a game that has ended stays as it is, with reward 0. Walls and the prey's
        places are shared with `state`. Wrong actions raise ValueError, but values on a GPU are not
        read back: there, one outside 0..6 acts as stay."""
        self._check_actions(actions, state)
        return self._transition(state, actions)

    def _transition(self, state, actions):
        ended = self.game_over(state)
        active = state.present & ~ended[:, None]
        known = (actions >= 0) & (actions < NUM_ACTIONS)
        actions = torch.where(active & known, actions, STAY).long()

        target = self.target[state.position, actions]
        free = state.walls.gather(1, target) == 0
        position = torch.where(free, target, state.position)

        hunting = self._on_prey(state) & (actions[..., None] == self.hunt_action)  # [B, N, P]
        party = hunting.sum(1)  # [B, P]
        caught = party >= self.party_needed
        success = hunting & caught[:, None]  # [B, N, P]
        share = self.prey_value / party.clamp(min=1)
        reward = torch.where(success, share[:, None], 0.0).sum(2)

        clock = state.time + (~ended).to(torch.int32)
        is_first = caught.any(1) & (state.first_hunt < 0)
        next_state = State(
            position=position.to(torch.int32),
            present=state.present & ~success.any(2),
            prey_position=state.prey_position,
            prey_alive=state.prey_alive & ~caught,
            walls=state.walls,
            time=clock,
            first_hunt=torch.where(is_first, clock, state.first_hunt),
        )
        return next_state, reward, active, self.game_over(next_state)

    def game_over(self, state: State) -> Tensor:
        """bool [B]"""
        over = ~state.present.any(1) | (state.time >= self.config.final_time)
        limit = self.config.steps_after_first_hunt
        if limit is not None:
            over |= (state.first_hunt >= 0) & (state.time - state.first_hunt >= limit)
        return over

    def observe(self, state: State) -> Tensor:
        """uint8 [B, N, C, H, W]: each player's planes in its ego order"""
        config = self.config
        player_cells, prey_cells = self._shown_cells(state)
        players = self.one_hot[self.seats_to_ego(player_cells)]  # [B, N, N, words]
        prey = self.one_hot[prey_cells]  # [B, P, words]
        stags = prey[:, : config.num_stags].sum(1, dtype=self.word)
        hares = prey[:, config.num_stags :].sum(1, dtype=self.word)
        shared = torch.stack([state.walls.view(self.word), stags, hares], 1)[:, None]
        planes = torch.cat([players, shared.expand(-1, config.num_players, -1, -1)], 2)
        return planes.view(torch.uint8).unflatten(-1, (config.height, config.width))

    def cells(self, state: State) -> Tensor:
        """uint8 [B, N, N + P]: in each player's ego order the cell of everybody, then of each prey;
        H*W: not there"""
        players, prey = self._shown_cells(state)
        prey = prey[:, None].expand(-1, self.config.num_players, -1)
        return torch.cat([self.seats_to_ego(players), prey], 2).to(torch.uint8)

    def _shown_cells(self, state):  # [B, N], [B, P]; H*W: not there
        players = torch.where(state.present, state.position, self.config.num_cells)
        prey = torch.where(state.prey_alive, state.prey_position, self.config.num_cells)
        return players, prey

    def clock(self, state: State) -> Tensor:
        """float [B]: the share of the game's time that has passed"""
        return state.time / self.config.final_time

    def distance_to_prey(self, state: State, hunt_action: int, bound: str | None = None) -> Tensor:
        """int32 [B, H*W]: steps from each cell to the nearest living prey of that kind, around walls;
        FAR if there is none. `bound`: only the "first" or the "last" of them counts, by cell number, or
        those farthest to the "left"."""
        stags = self.config.num_stags
        kind = slice(0, stags) if hunt_action == HUNT_STAG else slice(stags, None)
        prey = state.prey_position[:, kind]
        counts = state.prey_alive[:, kind]
        if prey.shape[1] == 0:
            return torch.full_like(state.walls, FAR, dtype=torch.int32)
        if bound is not None:
            ranks = {"first": prey, "last": -prey, "left": prey % self.config.width}
            rank = ranks[bound]
            counts = counts & (rank == torch.where(counts, rank, FAR).amin(1, keepdim=True))
        distance = torch.where(counts[..., None], self.manhattan[prey], FAR).amin(1)
        if self.config.max_wall_pieces:
            distance = self._around_walls(distance == 0, state.walls > 0)
        return distance

    def _around_walls(self, goal, walls):  # bool [B, H*W] both
        distance = torch.where(goal, 0, FAR)
        for _ in range(self.longest_path):
            step = distance[:, self.target[:, :4]].amin(2) + 1
            distance = torch.minimum(distance, step)
            distance = torch.where(walls, FAR, distance).clamp(max=FAR)
        return distance

    def reset(self, seed: int | None = None) -> Tensor:
        """Deals all games anew, from `seed` if one is given; returns the observation."""
        if seed is not None:
            self.generator.manual_seed(seed)
        deals = self.initial_state()
        copy_nested_(self.state._asdict(), deals._asdict())
        copy_nested_(self.final_state._asdict(), deals._asdict())
        copy_nested_(self._next._asdict(), self.initial_state()._asdict())
        for counter in (self._dealt, self.episode_return, self.final_return):
            counter.zero_()
        return self.observe(self.state)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `transition`, but returns the observation [B, N, C, H, W]: the new game's where one ended."""
        self._check_actions(actions, self.state)
        reward, present_before, done = self.advance(actions)
        return self.observe(self.state), reward, present_before, done

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `step`, without the observation and the check: what is no action is STAY"""
        reward, present_before, done = self._advance(actions)
        self._refill(self._uniform(self.deals_per_step))
        return reward, present_before, done

    def _advance(self, actions):
        state, reward, present_before, done = self._transition(self.state, actions)
        ended = done[:, None]
        total = self.episode_return + reward
        self.episode_return.copy_(total.masked_fill(ended, 0.0))
        torch.where(ended, total, self.final_return, out=self.final_return)
        for name in self._carried:
            after = getattr(state, name)
            current = getattr(self.state, name)
            final = getattr(self.final_state, name)
            dealt = getattr(self._next, name)
            rows = done if after.dim() == 1 else ended
            torch.where(rows, after, final, out=final)
            torch.where(rows, dealt, after, out=current)
        return reward, present_before, done

    def _refill(self, uniform):
        deals = self._deal(uniform)
        place = self._dealt + torch.arange(self.deals_per_step, device=self.device)
        place = torch.where(place < self.num_envs, place, place - self.num_envs)
        for name in self._dealt_anew:
            getattr(self._next, name)[place] = getattr(deals, name)
        self._dealt.copy_((self._dealt + self.deals_per_step) % self.num_envs)

    @property
    def final_prey(self) -> Tensor:
        """int64 [B, N], of the last game that ended there: HUNT_STAG, HUNT_HARE or 0"""
        state = self.final_state  # who has caught prey left from its cell
        same_cell = state.position[..., None] == state.prey_position[:, None]
        left_from = same_cell & ~state.present[..., None]
        return (left_from * self.hunt_action).sum(2)

    def final_observation(self) -> Tensor:
        """uint8 [B, N, C, H, W]: the last observation of the last game that ended there"""
        return self.observe(self.final_state)

    def state_dict(self) -> dict[str, Tensor]:
        """All that `step` changes: as in torch, the tensors themselves"""
        saved = {name: getattr(self, name) for name in ("_dealt", "episode_return", "final_return")}
        for group in ("state", "final_state", "_next"):
            for name, x in getattr(self, group)._asdict().items():
                saved[f"{group}.{name}"] = x
        saved["generator"] = self.generator.get_state()
        return saved

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        copy_nested_(self.state_dict(), saved)
        self.generator.set_state(saved["generator"].cpu())

    def _check_actions(self, actions, state):
        dtype = actions.dtype if isinstance(actions, Tensor) else type(actions).__name__
        if dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            raise ValueError(f"actions must be a tensor of integers, not {dtype}")
        wanted = list(state.position.shape), state.position.device.type
        shape = list(actions.shape), actions.device.type
        if wanted != shape:
            raise ValueError(f"actions must have shape and device {wanted}, not {shape}")
        if actions.device.type == "cpu" and not 0 <= actions.min() <= actions.max() < NUM_ACTIONS:
            raise ValueError(f"actions must be 0 to {NUM_ACTIONS - 1}, not {actions.min()} to {actions.max()}")


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is the GPU if there is one"""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"--device: unknown device {device!r}") from error
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        missing = (device.index or 0) >= gpus
        refuse(missing, f"--device {device} was asked for, but torch sees {gpus} GPUs")
    return device


def copy_state(state: State) -> State:
    return State(*(x.clone() for x in state))


def copy_nested_(kept: dict, saved: dict, name: str = "", check_only: bool = False) -> None:
    """Copies saved tensors into those that are there, also in dicts of dicts; checks all first"""
    if not check_only:
        copy_nested_(kept, saved, name, check_only=True)
    for key, tensor in kept.items():
        path = f"{name}.{key}".lstrip(".")
        value = saved.get(key)
        refuse(value is None, f"{path} is missing in what was saved")
        if isinstance(tensor, dict):
            copy_nested_(tensor, value, path, check_only)
        elif check_only:
            was = f"{value.dtype} {list(value.shape)}"
            here = f"{tensor.dtype} {list(tensor.shape)}"
            refuse(was != here, f"{path} was saved as {was}, but here it is {here}")
        else:
            tensor.copy_(value)


def planes(config: StagHuntConfig, cells: Tensor, walls: Tensor) -> Tensor:
    """uint8 [..., C, H, W] of boards in ego order: cells [..., N + P] as `StagHuntEnv.cells` gives them,
    walls [..., H*W] (one 0 where the game has none)"""
    number = torch.arange(config.num_cells, device=cells.device)
    one_hot = (cells[..., None] == number).to(torch.uint8)  # [..., N + P, H*W]
    players, stags, hares = one_hot.split([config.num_players, config.num_stags, config.num_hares], -2)
    walls = walls.to(torch.uint8).expand(*walls.shape[:-1], config.num_cells)
    stags = stags.sum(-2, dtype=torch.uint8)
    hares = hares.sum(-2, dtype=torch.uint8)
    shared = torch.stack([walls, stags, hares], -2)
    return torch.cat([players, shared], -2).unflatten(-1, (config.height, config.width))


def _distinct(uniform, end):
    """[B, K] uniform in [0, 1) -> [B, K] distinct, below `end` (an int or [B, 1]), in random order"""
    places = uniform.shape[1]
    not_taken = end - torch.arange(places, device=uniform.device)
    number = (uniform * not_taken).to(torch.int32)  # among those not yet taken
    for k in reversed(range(places - 1)):
        later = number[:, k + 1 :]
        later += later >= number[:, k : k + 1]
    return number


def wall_placements(height: int, width: int) -> np.ndarray:
    """bool [placements, H*W]: every way to lay a straight or L-shaped piece of 3 or 4 cells"""
    board = set(itertools.product(range(height), range(width)))
    arms = (2, 0), (3, 0), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)  # above or below the corner, and beside it
    pieces = set()
    for (row, column), (tall, wide), down, right in itertools.product(board, arms, (-1, 1), (-1, 1)):
        piece = {(row + down * k, column) for k in range(tall + 1)}
        piece |= {(row, column + right * k) for k in range(wide + 1)}
        if piece <= board:
            pieces.add(tuple(sorted(row * width + column for row, column in piece)))
    refuse(not pieces, f"--max-wall-pieces must be 0: no piece of 3 cells fits on a {height}x{width} board")
    return np.array([np.isin(np.arange(height * width), piece) for piece in sorted(pieces)])


# Rule-based players: (env, state, seat) -> probabilities [B, 7]; seat may be a slice, then [B, seats, 7].
# To add one, add a function to PLAYER_PROBS; one that no population may hold, to STRANGER_PROBS.


def random_probs(env: StagHuntEnv, state: State, seat: int | slice = ALL_SEATS) -> Tensor:
    legal = env.legal_actions(state)[:, seat]
    return legal / legal.sum(-1, keepdim=True)


def hunter_probs(env, state, seat=ALL_SEATS, *, prey: int, bound=None, noise=0.0, waits=False) -> Tensor:
    """Ties: uniform over the first steps of all shortest paths to all nearest prey."""
    legal = env.legal_actions(state)[:, seat]
    distance = env.distance_to_prey(state, prey, bound)
    cell = state.position[:, seat].long()
    target = env.target[cell]
    now = distance.gather(1, cell.view(len(cell), -1)).view(*cell.shape, 1)
    after = distance.gather(1, target.flatten(1)).view(target.shape)

    at_prey = env.is_stay if waits else env.hunt == prey
    without_prey = env.is_stay if waits else legal
    wanted = legal & ((after < now) | ((now == 0) & at_prey))
    wanted = torch.where(wanted.any(-1, keepdim=True), wanted, without_prey)
    probs = wanted / wanted.sum(-1, keepdim=True)
    if noise:
        return (1 - noise) * probs + noise * legal / legal.sum(-1, keepdim=True)
    return probs


PLAYER_PROBS: dict[str, Callable] = {
    "random": random_probs,
    "nearest_stag": partial(hunter_probs, prey=HUNT_STAG),
    "nearest_hare": partial(hunter_probs, prey=HUNT_HARE),
    "first_stag": partial(hunter_probs, prey=HUNT_STAG, bound="first"),
    "last_stag": partial(hunter_probs, prey=HUNT_STAG, bound="last"),
}
STRANGER_PROBS: dict[str, Callable] = {
    "noisy_stag": partial(hunter_probs, prey=HUNT_STAG, noise=0.2),
    "noisy_hare": partial(hunter_probs, prey=HUNT_HARE, noise=0.2),
    "waiting": partial(hunter_probs, prey=HUNT_STAG, waits=True),
    "left_stag": partial(hunter_probs, prey=HUNT_STAG, bound="left"),
}
# The rule of `switching` goes by the number of the game, which a state does not hold.
STRANGERS = (*STRANGER_PROBS, "switching")
POPULATION = ("random", "nearest_stag", "nearest_hare")
LEARNER, MIXED, SWITCHING = -1, -2, -3  # what a seat may hold besides the number of a player


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """[..., A] -> int64 [...]. Never draws an action of probability 0."""
    # Whose clock rings first, at rates `probs`
    noise = torch.empty_like(probs).exponential_(generator=generator)
    noise.clamp_(min=torch.finfo(noise.dtype).tiny)  # never 0: argmax takes 0 / 0 for the largest
    return (probs / noise).argmax(-1)


# Seats: who plays where, and what can be known about them


@dataclasses.dataclass
class SeatFlags:
    seats: str | None = None  # who sits where: learner, mixed, a player or a stranger (None: learners everywhere)
    population: str = ",".join(POPULATION)  # the players that mixed seats, pretraining and the exact posterior know
    redraw: str = "game"  # when a mixed seat gets a new player: after each game, never, or with this probability
    unsteady: Fraction = 0.5
    """share of the places whose mixed seats get a new player after each game whatever --redraw says,
    while the others' memory goes on: so a learner learns that somebody may not be who it was (it
    changes nothing where no memory outlasts a game)"""


def seats_table(seats: str | list[str] | None, num_players: int) -> list[str]:
    """--seats as a list of names; None: learners everywhere"""
    if seats is None:
        return ["learner"] * num_players
    names = player_names("--seats", seats, ("learner", "mixed", *STRANGERS, *PLAYER_PROBS))
    wrong = len(names) != num_players
    refuse(wrong, f"--seats names {len(names)}, but the game has --num-players {num_players}: {','.join(names)}")
    return names


def population_names(population: Names) -> list[str]:
    """--population as a list of names"""
    names = player_names("--population", population, tuple(PLAYER_PROBS))
    refuse(len(set(names)) < len(names), f"--population names a player twice: {','.join(names)}")
    return names


def player_names(flag: str, value: Names, known: tuple[str, ...]) -> list[str]:
    names = value.split(",") if isinstance(value, str) else list(value)
    for name in names:
        refuse(name not in known, f"{flag}: unknown player {name!r}; the known ones are {', '.join(known)}")
    return names


def redraw_prob(redraw: str | float) -> float:
    """--redraw as the probability that a mixed seat gets a new player after a game"""
    with contextlib.suppress(ValueError):
        prob = float({"game": 1, "never": 0}.get(redraw, redraw))
        if 0 <= prob <= 1:
            return prob
    raise UserError(f"--redraw must be game, never or a probability, not {redraw}")


class Seats:
    """Who sits where in S blocks of E games (B = S*E = env.num_envs), and the exact posterior over
    who it is. In each step call `action_probs`, ask what you need, then `update`.

    `tables` names the N players of each block. The M learners are numbered block by block, seat by
    seat; with `share_parameters` those of a block are one learner with more games. `remember`: the
    posterior outlasts a game. `watch`: learners only watch, and drawn players sit in all seats.
    `teams`: in every second game those drawn are of one kind, all but one (`_make_teams`).
    `unsteady`: share of the games of a block, the first ones, in which mixed seats are redrawn after
    each game; the posterior expects as many, and infers it. `kinds` int64 [B, N]: LEARNER, or a
    number in `names`, whose first P are the population."""

    def __init__(
        self,
        env: StagHuntEnv,
        tables: list,
        share_parameters: bool = False,
        population: Names = POPULATION,
        redraw: str | float = "game",
        remember: bool = False,
        watch: bool = False,
        teams: bool = False,
        unsteady: float = 0.0,
    ):
        players = env.config.num_players
        tables = [seats_table(table, players) for table in tables]
        uneven = env.num_envs % len(tables) > 0
        refuse(uneven, f"{env.num_envs} games cannot be dealt evenly to {len(tables)} tables")
        self.env = env
        self.num_blocks = len(tables)
        self.num_envs = env.num_envs // len(tables)
        self.population = population_names(population)
        self.share_parameters = share_parameters
        self.watch = watch
        self._number_learners(tables)
        seated = [["mixed"] * players] * len(tables) if watch else tables
        self._name_players(seated)
        table_kinds = [[self._kind[name] for name in table] for table in seated]
        kinds = torch.tensor(table_kinds, device=env.device).repeat_interleave(self.num_envs, 0)  # [B, N]
        number = torch.arange(env.num_envs, device=env.device) % self.num_envs
        self._team = ((number % 2 == 1) & teams)[:, None]
        team_number = number[:, None] // 2
        seat = torch.arange(players, device=env.device)
        self._onlooker = seat == team_number % players
        self._draw_players(kinds, team_number // players)
        mixed = kinds == MIXED
        self._steady_prob = mixed * redraw_prob(redraw)  # [B, N] of a new player after a game
        changes = number < round(unsteady * self.num_envs)
        self._redraw_prob = torch.where(mixed & changes[:, None], 1.0, self._steady_prob)
        self._start_posterior(remember, unsteady)
        self._table = self._probs = None  # what the last `action_probs` computed

    def _number_learners(self, tables):
        learns = [[name == "learner" for name in table] for table in tables]
        learns = torch.tensor(learns, device=self.env.device)  # [S, N]
        learners = learns.sum(1).tolist()
        differ = self.share_parameters and len(set(learners)) > 1
        refuse(differ, f"--share-parameters needs as many learners in each table, not {learners}")
        self.num_learners = self.num_blocks if self.share_parameters else sum(learners)
        self.everybody_learns = bool(learns.all())
        self.has_rule_based = self.watch or not self.everybody_learns
        self._block, self._seat = learns.nonzero(as_tuple=True)
        row = learns.flatten().cumsum(0) - 1
        self._row = row.clamp(min=0).view(learns.shape)  # [S, N] place among the learners
        self._learns = learns.repeat_interleave(self.num_envs, 0)  # [B, N]
        seat = torch.arange(learns.shape[1], device=self.env.device)
        self.learner_seat = self.to_learners(seat.expand(self._learns.shape))  # [M, E]

    def _name_players(self, seated):
        """Numbers those who sit somewhere, the population first"""
        named = set(itertools.chain(*seated))
        self._switches = "switching" in named
        if self._switches:
            named |= {"nearest_stag", "nearest_hare"}
        others = named - set(self.population)
        rules = PLAYER_PROBS | STRANGER_PROBS
        self.names = self.population + [name for name in rules if name in others]
        self._rules = [rules[name] for name in self.names]
        self._kind = {name: number for number, name in enumerate(self.names)}
        self._kind |= {"learner": LEARNER, "mixed": MIXED, "switching": SWITCHING}

    def _draw_players(self, kinds, team_kind):
        device = kinds.device
        count = len(self.population)
        players = kinds.shape[1]
        # Dealt evenly: with players that stay, luck would else outweigh what is to be measured.
        order = torch.rand(self.num_blocks, self.num_envs, players, device=device).argsort(1)
        first = torch.randint(count, (self.num_blocks, 1, players), device=device)
        drawn = (order + first).flatten(0, 1)  # [B, N]
        drawn = torch.where(self._team, team_kind, drawn) % count
        drawn = self._make_teams(drawn)
        self.kinds = torch.where(kinds == MIXED, drawn, kinds)
        self._switching = kinds == SWITCHING
        if self._switches:
            hunts_stag = torch.rand(kinds.shape, device=device) < 0.5
            hunter = torch.where(hunts_stag, self._kind["nearest_stag"], self._kind["nearest_hare"])
            self.kinds = torch.where(self._switching, hunter, self.kinds)

    def _make_teams(self, drawn):
        """kinds [B, N] -> the same; in teams all are like the first. Else three hare hunters would be
        rare. But one, another in each game, plays at random, if the population does: it is still there
        when the others have left, and so sees what is left for it."""
        team = drawn[:, :1].expand_as(drawn)
        if "random" in self.population:
            team = torch.where(self._onlooker, self._kind["random"], team)
        return torch.where(self._team, team, drawn)

    def settle(self) -> None:
        """From now on players stay as --redraw says everywhere; the posterior does not know"""
        self._redraw_prob = self._steady_prob

    def _start_posterior(self, remember, unsteady):
        """Jointly over who it is [P] and, if some are unsteady, whether it is [2]: [B, N, 1 or 2, P]"""
        count = len(self.population)
        device = self.kinds.device
        shares = [1.0]
        if unsteady > 0:
            unsteady = min(unsteady, 1 - 1e-6)
            shares = [1 - unsteady, unsteady]
        shares = torch.tensor(shares, device=device)[:, None]
        self._log_prior = (shares / count).log().expand(-1, count)  # [1 or 2, P]
        self.log_joint = self._log_prior.expand(*self.kinds.shape, -1, -1).clone()
        # After a game who it is becomes (1 - forget) * posterior + forget * prior.
        forget = torch.stack([self._steady_prob, torch.ones_like(self._steady_prob)], 2)[..., : len(shares), None]
        if not remember:
            forget = torch.ones_like(forget)
        self._log_keep = (1 - forget).log()
        self._log_forget = (forget / count).log()

    @property
    def log_posterior(self) -> Tensor:
        """[B, N, P] who it is"""
        return self.log_joint.logsumexp(2) if len(self._log_prior) > 1 else self.log_joint[:, :, 0]

    def to_learners(self, x: Tensor) -> Tensor:
        """[B, N, ...] by seat -> [M, E, ...]"""
        x = x.unflatten(0, (self.num_blocks, self.num_envs)).movedim(2, 1)  # [S, N, E, ...]
        x = x.flatten(0, 1) if self.everybody_learns else x[self._block, self._seat]
        return self._share(x)

    def per_learner(self, x: Tensor) -> Tensor:
        """[B, ...], the same for all seats -> [M, E, ...], a copy"""
        x = x.unflatten(0, (self.num_blocks, self.num_envs))
        return self._share(x[self._block])

    def _share(self, x):
        if not self.share_parameters:
            return x
        return x.unflatten(0, (self.num_blocks, -1)).flatten(1, 2)

    def to_seats(self, x: Tensor, others: Tensor | None = None) -> Tensor:
        """[M, E, ...] -> [B, N, ...], `others` [B, N, ...] where no learner sits"""
        x = x.reshape(len(self._seat), self.num_envs, *x.shape[2:])
        x = x[self._row].movedim(1, 2).flatten(0, 1)
        if self.everybody_learns:
            return x
        learns = self._learns.view(*self._learns.shape, *[1] * (x.dim() - 2))
        return torch.where(learns, x, others)

    def action_probs(self, state: State, learner_probs: Tensor | None = None) -> Tensor:
        """[B, N, 7] everybody's probabilities; learner_probs [M, E, 7] unless the learners only watch"""
        learners_act = self.num_learners > 0 and not self.watch
        refuse(learners_act == (learner_probs is None), "learner_probs are for learners that do not only watch")
        probs = None
        if self.has_rule_based:
            rules = [rule(self.env, state, ALL_SEATS) for rule in self._rules]
            self._table = torch.stack(rules, 2)  # [B, N, names, 7]
            kind = self.kinds.clamp(min=0)[..., None, None]
            probs = self._table.gather(2, kind.expand(-1, -1, 1, NUM_ACTIONS)).squeeze(2)
        if learner_probs is not None:
            probs = self.to_seats(learner_probs, probs)
        self._probs = probs
        return probs

    def posterior(self) -> Tensor:
        """[B, N, P] which player of the population it is; of a learner the prior"""
        return self.log_posterior.exp()

    def posterior_probs(self, posterior: Tensor) -> Tensor:
        """[B, N, 7] the best prediction of an action by the posterior [B, N, P] before it; of a learner
        its own probabilities"""
        if not self.has_rule_based:
            return self._probs
        of_population = self._table[:, :, : len(self.population)]
        expected = (posterior[..., None] * of_population).sum(2)
        return torch.where((self.kinds == LEARNER)[..., None], self._probs, expected)

    def update(self, actions: Tensor, present_before: Tensor, done: Tensor) -> None:
        """Bayes' rule with the last `action_probs`; new players only where a game ended"""
        if not self.has_rule_based:
            return
        ended = done[:, None]
        self._update_posterior(actions, present_before, ended)
        self._redraw_players(ended)

    def _update_posterior(self, actions, present_before, ended):
        count = len(self.population)
        action = actions.long()[..., None, None].expand(-1, -1, count, 1)
        likelihood = self._table[:, :, :count].gather(3, action).squeeze(3)
        likelihood = likelihood.clamp(min=1e-9)  # a stranger does anything
        acted = present_before & (self.kinds != LEARNER)
        evidence = likelihood.log() * acted[..., None]
        log_joint = self.log_joint + evidence[:, :, None]
        log_joint = log_joint.flatten(2).log_softmax(2).view(log_joint.shape)
        log_mass = log_joint.logsumexp(3, keepdim=True)
        next_game = torch.logaddexp(log_joint + self._log_keep, log_mass + self._log_forget)
        self.log_joint.copy_(torch.where(ended[..., None, None], next_game, log_joint))

    def _redraw_players(self, ended):
        uniform = torch.rand(self.kinds.shape, device=ended.device)
        redrawn = ended & (uniform < self._redraw_prob)
        drawn = self._make_teams(torch.randint_like(self.kinds, len(self.population)))
        kinds = torch.where(redrawn, drawn, self.kinds)
        if self._switches:
            both = self._kind["nearest_stag"] + self._kind["nearest_hare"]
            kinds = torch.where(self._switching & ended, both - kinds, kinds)
        self.kinds.copy_(kinds)

    def state_dict(self) -> dict[str, Tensor]:
        return {"kinds": self.kinds, "log_joint": self.log_joint}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        copy_nested_(self.state_dict(), saved)


# Pictures

COLOURS = ("#d64541", "#3478c8", "#f0b429", "#8255b4", "#1ea096", "#eb7832", "#dc5a96", "#5a5a64")
GRASS = ("#bad58e", "#b0cd82")
WALL = "#a5a09b"
INK = {"b": "#6e4623", "B": "#a56e3c", "k": "#281e19", "w": "#f5f0e6", "g": "#a5a09b", "p": "#e19696"}
SPRITES = {  # 12 rows of 12 dots
    "stag": ".b.b....b.b. .bbb....bbb. ..bb....bb.. ...bb..bb... .BB.BBBB.BB. ..BBBBBBBB.. "
    "...BkBBkB... ...BBBBBB... ....BBBB.... ....BBBB.... ....BkkB.... .....BB.....",
    "hare": "...gg..gg... ..ggpggpgg.. ..gpggggpg.. ..gpg..gpg.. ...gg..gg... ..wwwwwwww.. "
    ".wwkwwwwkww. .wwwwwwwwww. .wwwwppwwww. ..wwwkkwww.. ...wwwwww... ............",
}
CELL = 108  # pixels
LINE = 40  # pixels of a line of text
RIM = ((-1, -1), (1, 1), (1, -1), (-1, 1), (-1, 0), (1, 0), (0, 1), (0, -1))  # places of players in company
FONT = cache(ImageFont.load_default)


def render_ansi(config: StagHuntConfig, state: State, returns: Tensor | None = None) -> str:
    """The first game as text: digits are players, S a stag, h a hare, # a wall"""
    game = one_game(state)
    marks = [str(i) for i in range(config.num_players)] + ["#", "S", "h"]
    shown = seat_planes(config, game).reshape(-1, config.height, config.width)
    lines = []
    for row in range(config.height):
        line = "|"
        for column in range(config.width):
            seen = itertools.compress(marks, shown[:, row, column])
            line += "".join(seen).center(config.num_players + 1) + "|"
        lines.append(line)
    summary = [f"t={game.time}/{config.final_time} "]
    if returns is not None:
        summary += [f"{i}: {score:.4g}" for i, score in enumerate(returns[0].tolist())]
    return "\n".join([*lines, "  ".join(summary)])


def render_rgb(config, state: State, returns=None, names=None, hunting=None) -> np.ndarray:
    """The first game as a picture, uint8 [height, width, 3]: the board, the clock, each player's name
    and return. `hunting` [N], actions: who hunts in this step gets a ring."""
    players = config.num_players
    board = _draw_board(config, seat_planes(config, one_game(state)), hunting=hunting)
    size = max(board.width, 320), board.height + LINE * (1 + players)
    image = Image.new("RGB", size, "white")
    image.paste(board)
    draw = ImageDraw.Draw(image)
    scores = torch.zeros(players) if returns is None else returns[0]
    names = names or [""] * players
    lines = [f"t {int(state.time[0])}/{config.final_time}"]
    lines += [f"{i} {names[i]}  {scores[i]:.4g}" for i in range(players)]
    for row, text in enumerate(lines):
        colour = "black" if row == 0 else COLOURS[row - 1]
        place = 10, board.height + LINE * row + LINE // 2
        draw.text(place, text, colour, FONT(24), "lm", stroke_width=0.5)
    return np.array(image)


def render_planes(config: StagHuntConfig, planes, values=None) -> np.ndarray:
    """Planes [C, H, W] of one observation as a picture, uint8 [height, width, 3]. What is neither 0
    nor 1 in `values` (default: the planes), such as a probability, is written beside its mark."""
    planes = np.asarray(planes, np.float32).reshape(config.num_players + 3, -1)
    values = planes if values is None else np.asarray(values, np.float32).reshape(planes.shape)
    return np.array(_draw_board(config, np.maximum(planes, values), values))


def one_game(state: State) -> State:
    """The first game as plain lists and numbers"""
    return State(*(x[0].tolist() for x in state))


def seat_planes(config: StagHuntConfig, game: State) -> np.ndarray:
    """[C, H*W] of `one_game`: players by seat, walls, stags, hares"""
    walls = config.num_players
    planes = np.zeros((config.num_players + 3, config.num_cells))
    planes[range(walls), game.position] = game.present
    planes[walls] = game.walls
    for prey, cell in enumerate(game.prey_position):
        kind = 1 if prey < config.num_stags else 2
        planes[walls + kind, cell] += game.prey_alive[prey]
    return planes


def _draw_board(config, planes, values=None, hunting=None):
    """planes [C, H*W]; values [C, H*W] to write; hunting [N]"""
    image = Image.new("RGB", (config.width * CELL, config.height * CELL))
    draw = ImageDraw.Draw(image)
    walls = config.num_players
    for cell, (row, column) in enumerate(np.ndindex(config.height, config.width)):
        left = column * CELL
        top = row * CELL
        square = (left, top, left + CELL - 1, top + CELL - 1)
        draw.rectangle(square, GRASS[(row + column) % 2])
        seen = np.flatnonzero(planes[:, cell] > 0.01).tolist()
        for plane in reversed(seen):  # players on top
            x = left + CELL // 2
            y = top + CELL // 2
            half = CELL // 3
            if plane < walls:
                if len(seen) > 1:
                    half = CELL // 6
                    x += 2 * half * RIM[plane][0]
                    y += 2 * half * RIM[plane][1]
                hunts = hunting is not None and hunting[plane] > STAY
                ring = "black" if hunts else None
                draw.circle((x, y), half, COLOURS[plane], outline=ring, width=4)
                _write(draw, (x, y), str(plane), half, "white", "black")
            elif plane == walls:
                half = CELL // 2
                draw.rectangle(square, WALL)
            else:
                sprite = SPRITES["stag" if plane == walls + 1 else "hare"]
                _draw_sprite(draw, sprite, x - half, y - half, half // 6)
            if values is not None and 0.01 < values[plane, cell] < 0.99:
                _write(draw, (x, y - half + 8), f"{values[plane, cell]:.2f}"[1:], 20)
    return image


def _draw_sprite(draw, sprite, left, top, dot):
    for row, dots in enumerate(sprite.split()):
        for column, letter in enumerate(dots):
            if letter in INK:
                x = left + column * dot
                y = top + row * dot
                draw.rectangle((x, y, x + dot - 1, y + dot - 1), INK[letter])


def _write(draw, middle, text, size, colour="black", rim="white"):
    draw.text(middle, text, colour, FONT(size), "mm", stroke_width=2, stroke_fill=rim)


def write_gif(path: str, frames: list[np.ndarray], fps: float = 4) -> None:
    images = [Image.fromarray(frame) for frame in frames]
    milliseconds = [round(1000 / fps)] * (len(images) - 1) + [1500]
    shown = {"duration": milliseconds, "loop": 0, "optimize": True}
    images[0].save(path, save_all=True, append_images=images[1:], **shown)


# Wrappers: one game, numpy in and out


def integer_below(end: int, value) -> int | None:
    """`value` as an int if it is an integer from 0 to end - 1 (True is none), else None"""
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    if is_bool or getattr(value, "ndim", 0) > 0:
        return None
    try:
        number = operator.index(value)
    except TypeError:  # a float, None, a word
        return None
    return number if 0 <= number < end else None


def short_repr(value) -> str:
    return " ".join(reprlib.repr(value).split())


RENDERERS = {"ansi": render_ansi, "rgb_array": render_rgb}
HUNTED = {"nearest_stag": HUNT_STAG, "nearest_hare": HUNT_HARE}


class StagHuntParallelEnv(ParallelEnv):
    """PettingZoo wrapper. Agents are the learners among `seats` (default: all seats). The game is set
    by `config`, by a dict of its fields or by the fields: StagHuntParallelEnv(height=5). Who has left
    stays an agent, with one legal action. The end is a termination, never a truncation; it also comes
    once all agents have left. The rules stand here once more in plain Python, ten
    times faster than torch on a batch of one; a test compares."""

    metadata: ClassVar = {"name": "stag_hunt_v0", "render_modes": list(RENDERERS), "render_fps": 4}

    def __init__(self, config: StagHuntConfig | dict | None = None, render_mode=None, seats=None, **fields):
        config_fields = config if isinstance(config, dict) else vars(config or StagHuntConfig())
        self.config = StagHuntConfig(**{**config_fields, **fields})
        self.seats = seats_table(seats, self.config.num_players)
        self.render_mode = render_mode
        changing = "mixed" in self.seats or "switching" in self.seats
        refuse(changing, "a wrapper seats learners and players that stay the same, not mixed or switching")
        refuse(render_mode not in (None, *RENDERERS), f"render_mode {render_mode!r} is none of {list(RENDERERS)}")
        self.core = StagHuntEnv(self.config)
        self.core.generator.seed()  # games differ until reset(seed=...)
        self.random = random.Random()
        self.target = self.core.target.tolist()
        self.hunt_action = self.core.hunt_action.tolist()
        self.game = None
        self.seat = {f"player_{i}": i for i, name in enumerate(self.seats) if name == "learner"}
        self.possible_agents = list(self.seat)
        self.agents = []

        planes, *board = self.config.observation_shape
        self.state_space = Box(0, 1, (planes + 1, *board), np.float32)
        observation_space = Dict(
            observation=MultiBinary((planes, *board)),  # SB3 takes a Box for an image
            action_mask=MultiBinary(NUM_ACTIONS),
            time=Box(0, 1, (1,), np.float32),
        )
        self.observation_space = dict.fromkeys(self.seat, observation_space).__getitem__
        self.action_space = {agent: Discrete(NUM_ACTIONS) for agent in self.seat}.__getitem__

    def reset(self, seed=None, options=None):
        if seed is not None:
            number = integer_below(2**64, seed)
            refuse(number is None, f"seed must be an integer, 0 to 2**64 - 1, not {short_repr(seed)}")
            self.core.generator.manual_seed(number)
            self.random.seed(number)
        self.game = one_game(self.core.initial_state(1))
        self.distance = {}
        self.returns = [0.0] * len(self.seats)
        self.agents = list(self.seat)
        return self._observe()

    def step(self, actions):
        refuse(not self.agents, "no game is on: call reset first")
        joint = self._joint_action(self._checked(actions))
        rewards = [0.0] * len(self.seats)
        parties = self._move(joint)
        self.game = self.game._replace(time=self.game.time + 1)
        for prey, party in enumerate(parties):
            needed = 2 if prey < self.config.num_stags else 1
            if len(party) >= needed:
                self._catch(prey, party, rewards)
        for i, reward in enumerate(rewards):
            self.returns[i] += reward

        over = self._is_over()
        if over:
            self.agents = []
        observations, infos = self._observe()
        agent_rewards = {agent: rewards[i] for agent, i in self.seat.items()}
        terminations = dict.fromkeys(self.seat, over)
        truncations = dict.fromkeys(self.seat, False)
        return observations, agent_rewards, terminations, truncations, infos

    def _checked(self, actions):  # {agent: action} with plain integers
        if not isinstance(actions, Mapping):
            raise UserError(f"actions must be a dict {{agent: action}}, not {short_repr(actions)}")
        missing = [agent for agent in self.agents if agent not in actions]
        refuse(bool(missing), f"there is no action for {', '.join(missing)}")
        unknown = [short_repr(name) for name in actions if name not in self.seat]
        refuse(bool(unknown), f"there is no agent {', '.join(unknown)}, only {', '.join(self.agents)}")
        checked = {}
        for agent in self.agents:
            action = integer_below(NUM_ACTIONS, actions[agent])
            if action is None:
                wrong = short_repr(actions[agent])
                raise UserError(f"the action of {agent} must be an integer, 0 to {NUM_ACTIONS - 1}, not {wrong}")
            checked[agent] = action
        return checked

    def _joint_action(self, actions):  # of all seats
        joint = []
        for i, name in enumerate(self.seats):
            action = actions[f"player_{i}"] if name == "learner" else self._choose(i, name)
            joint.append(action)
        return joint

    def _legal(self, i):  # the legal actions of seat i
        game = self.game
        if not game.present[i]:
            return [STAY]
        here = game.position[i]
        legal = []
        for action, target in enumerate(self.target[here][:STAY]):
            if target != here and not game.walls[target]:
                legal.append(action)
        legal.append(STAY)
        for prey, cell in enumerate(game.prey_position):
            if cell == here and game.prey_alive[prey]:
                legal.append(self.hunt_action[prey])
        return legal

    def _move(self, joint):
        """Moves everybody; returns the seats that hunt each prey"""
        game = self.game
        parties = [[] for _ in self.hunt_action]
        for i, action in enumerate(joint):
            if action not in self._legal(i):
                continue
            here = game.position[i]
            if action in (HUNT_STAG, HUNT_HARE):
                parties[game.prey_position.index(here)].append(i)
            else:
                game.position[i] = self.target[here][action]
        return parties

    def _catch(self, prey, party, rewards):
        """The party shares the prey's reward and leaves with it"""
        config = self.config
        value = config.stag_reward if prey < config.num_stags else config.hare_reward
        for i in party:
            rewards[i] += value / len(party)
            self.game.present[i] = False
        self.game.prey_alive[prey] = False
        if self.game.first_hunt < 0:
            self.game = self.game._replace(first_hunt=self.game.time)

    def _is_over(self):
        game = self.game
        everybody_left = not any(game.present[i] for i in self.seat.values())
        limit = self.config.steps_after_first_hunt
        late = limit is not None and 0 <= game.first_hunt <= game.time - limit
        return game.time >= self.config.final_time or everybody_left or late

    def _choose(self, i, name):  # the action of a rule-based player in seat i
        legal = self._legal(i)
        if name == "random":
            return self.random.choice(legal)
        hunt = HUNTED.get(name)
        if hunt is None:  # slower
            rule = (PLAYER_PROBS | STRANGER_PROBS)[name]
            return sample(rule(self.core, self._batch(), i), self.core.generator).item()
        key = (name, *self.game.prey_alive)
        if key not in self.distance:
            self.distance[key] = self.core.distance_to_prey(self._batch(), hunt)[0].tolist()
        steps = [self.distance[key][cell] for cell in self.target[self.game.position[i]]]
        wanted = [action for action in legal if action == hunt or steps[action] < steps[STAY]]
        return self.random.choice(wanted or legal)

    def _observe(self):  # observations, infos
        planes = self.state()
        players = len(self.seats)
        observations = {}
        infos = {}
        for agent, i in self.seat.items():
            seen = [(i + k) % players for k in range(players)]
            seen += [players, players + 1, players + 2]  # walls, stags, hares
            mask = np.zeros(NUM_ACTIONS, np.int8)
            mask[self._legal(i)] = 1
            observations[agent] = {
                "observation": planes[seen].astype(np.int8),
                "action_mask": mask,
                "time": planes[-1, 0, :1].copy(),
            }
            infos[agent] = {"action_mask": mask}
        return observations, infos

    def state(self) -> np.ndarray:
        """float32 [C + 1, H, W]: the planes as seat 0 sees them, and one filled with the clock"""
        refuse(self.game is None, "no game has begun: call reset first")
        clock = np.full(self.config.num_cells, self.game.time / self.config.final_time)
        planes = [*seat_planes(self.config, self.game), clock]
        return np.float32(planes).reshape(self.state_space.shape)

    def render(self):
        refuse(self.game is None, "no game has begun: call reset first")
        if self.render_mode is not None:
            draw = RENDERERS[self.render_mode]
            return draw(self.config, self._batch(), torch.tensor([self.returns]))

    def _batch(self):  # State, B = 1
        fields = zip(self.game, self.core.state, strict=True)
        return State(*(torch.tensor([value], dtype=like.dtype) for value, like in fields))


class StagHuntGymEnv(gymnasium.Env):
    """Gymnasium wrapper `StagHunt-v0`: one seat is the learner's, rule-based players sit in the others.
    The episode ends when the learner has left. Arguments as above:
    gymnasium.make("stag_hunt_env:StagHunt-v0", height=5)."""

    metadata: ClassVar = {"render_modes": list(RENDERERS), "render_fps": 4}

    def __init__(self, config=None, seats="learner,nearest_stag,nearest_hare,random", render_mode=None, **fields):
        self.parallel_env = env = StagHuntParallelEnv(config, render_mode, seats, **fields)
        learners = len(env.seat)
        refuse(learners != 1, f"StagHunt-v0 needs exactly 1 learner among the seats, not {learners}")
        (self.agent,) = env.seat
        self.render_mode = render_mode
        self.render = env.render
        self.observation_space = env.observation_space(self.agent)
        self.action_space = env.action_space(self.agent)

    def reset(self, *, seed=None, options=None):
        observations, infos = self.parallel_env.reset(seed)  # first: it refuses a wrong seed
        super().reset(seed=None if seed is None else int(seed))
        return observations[self.agent], infos[self.agent]

    def step(self, action):
        outcome = self.parallel_env.step({self.agent: action})
        return tuple(by_agent[self.agent] for by_agent in outcome)

    def action_masks(self) -> np.ndarray:
        """bool [7]: the name by which MaskablePPO of sb3-contrib asks"""
        env = self.parallel_env
        refuse(env.game is None, "no game has begun: call reset first")
        return np.isin(range(NUM_ACTIONS), env._legal(env.seat[self.agent]))


if "StagHunt-v0" not in gymnasium.registry:
    gymnasium.register("StagHunt-v0", entry_point=f"{__name__}:StagHuntGymEnv")


# Command line


def early_flags(words: list[str], **defaults: str) -> dict[str, str]:
    """The few flags that decide about the defaults of others, read first: name -> value"""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in defaults.items():
        spellings = {f"--{name}", f"--{name.replace('_', '-')}"}
        # Without its value it is left for `parse` to refuse.
        parser.add_argument(*spellings, dest=name, default=default, nargs="?", const=default)
    known, _ = parser.parse_known_args(words)
    return vars(known)


def early_board(height: str, width: str) -> StagHuntConfig:
    """The board of two early flags; a wrong one is left for `parse` to refuse"""
    with contextlib.suppress(ValueError):
        return StagHuntConfig(height=int(height), width=int(width))
    return StagHuntConfig()


def parse(args_type: type, groups: dict[str, type], default, words: list[str], note: str = ""):
    """Reads `words` into an args_type; `default`, another one, gives the defaults. A group is a box of
    --help and its dataclass: a base of args_type, or StagHuntConfig for its field `config`. --help
    begins with the docstring of args_type's module, and `note`."""
    boxes_type = dataclasses.make_dataclass("Flags", groups.items())
    boxes_type.__module__ = "builtins"  # else tyro looks for its text, again for each box
    defaults = []
    for group in groups.values():
        if group is StagHuntConfig:
            defaults.append(default.config)
        else:
            names = [field.name for field in dataclasses.fields(group)]
            defaults.append(group(**{name: getattr(default, name) for name in names}))
    module = sys.modules[args_type.__module__]
    boxes = tyro.cli(
        boxes_type,
        args=words,
        default=boxes_type(*defaults),
        config=(tyro.conf.OmitArgPrefixes,),
        description=f"{module.__doc__}\n\n{note}",
    )
    values = {}
    for box in vars(boxes).values():
        values |= {"config": box} if isinstance(box, StagHuntConfig) else vars(box)
    return args_type(**values)


def find_checkpoint(path: str | Path, flag: str = "") -> Path:
    """A checkpoint, or that of a run folder, which may be any seed's"""
    start = f"{flag} {path}".strip()  # as it was given
    path = Path(path)
    if path.is_dir():
        flags = path / "args.json"
        refuse(not flags.is_file(), f"{start} is no run folder: it has no args.json")
        named = path / json.loads(flags.read_text()).get("checkpoint", "checkpoint.pt")
        beside = path / named.name
        path = beside if beside.is_file() else named.resolve()
    refuse(not path.is_file(), f"{start}: there is no checkpoint {str(path)!r}")
    return path


def check_run_flags(args) -> None:
    """Refuses a run whose folder would fail later"""
    named = re.fullmatch(r"\w[\w.+=-]{0,99}", args.exp_name)
    refuse(not named, "--exp-name must be a name of up to 100 letters, digits and _ . + = -")
    refuse(args.seed + args.num_seeds > 2**40, "--seed must be below 2**40")
    refuse(not args.run_dir, "--run-dir must name a folder")


def command_line(parse_args: Callable[[list[str]], object], main: Callable[..., dict]) -> dict:
    """Runs main on the flags. Wrong flags and wrong input end with one line and exit code 2. What is
    not caught here is a mistake in the code and wants its traceback."""
    if "OMP_NUM_THREADS" not in os.environ:
        # Tensors are small here: a second thread brings 20 to 30 % (PPO on 8x8: 60 %). Beside a busy
        # program, where threads wait for each other, PPO has a quarter of the speed with two.
        torch.set_num_threads(1)
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # where an encoding has no such letter
        return main(_read_flags(parse_args))
    except KeyboardInterrupt:
        _exit("stopped", 130)
    except BrokenPipeError:  # such as --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be flushed
        sys.exit(0)
    except UserError as error:
        _exit(f"error: {error}", 2)
    except FloatingPointError as error:
        _exit(f"error: {error}", 1)
    except RuntimeError as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            _exit("stopped", 130)  # in an import that torch puts off
        raise


def _exit(message, code) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def _read_flags(parse_args):
    """tyro explains itself in a box, what is wrong first: this becomes one line"""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return parse_args(sys.argv[1:])
    except SystemExit as stop:
        if stop.code:
            box = [line.strip("│ ") for line in printed.getvalue().splitlines()[1:]]
            box = itertools.dropwhile(_is_frame, box)  # under the title, where there is no Unicode
            wrong = itertools.takewhile(lambda line: not _is_frame(line), box)
            print("error:", *wrong, file=sys.stderr)
        raise


def _is_frame(line):
    """Of tyro's box; a line of ASCII where the output knows no other letters"""
    return not line.strip("─╰╯-")


# Runs: the folders, log and checkpoint of a training script


@contextlib.contextmanager
def never_fatal(what: str):
    """Whatever goes wrong inside is reported in one line: TensorBoard never costs a run"""
    try:
        yield
    except Exception as error:
        print(f"could not {what}: {type(error).__name__}: {error}; the run goes on")


class Stopwatch:
    """Seconds of the stages before training; the imports come first"""

    def __init__(self):
        self.stages = {"imports": IMPORT_SECONDS}
        self.last = time.perf_counter()

    def record(self, name: str) -> None:
        now = time.perf_counter()
        self.stages[name] = now - self.last
        self.last = now


class Run:
    """The folders of a run, one per seed: args.json, TensorBoard, metrics.jsonl; checkpoint.pt in
    the first"""

    def __init__(self, args, label: str, checkpoint: dict | None, step: int):
        """A new run's, or the resumed one's as they were at `step`"""
        self.folders = [Path(args.run_dir)]
        try:
            if checkpoint:
                self.folders = resumed_folders(args, checkpoint)
            else:
                self.folders = new_folders(args, label)
            first_checkpoint = f"../{self.folders[0].name}/checkpoint.pt"
            self.flags = {**dataclasses.asdict(args), "checkpoint": first_checkpoint}
            self._open(step)
        except OSError as error:
            where = error.filename or self.folders[0]
            raise UserError(f"could not write to {where}: {error.strerror}") from error
        shown = {**self.flags, **self.flags["config"]}
        del shown["config"]
        table = "\n".join(f"|{name}|{value}|" for name, value in shown.items())
        for writer in self.writers:
            with never_fatal("write to TensorBoard"):
                writer.add_text("hyperparameters", f"|flag|value|\n|-|-|\n{table}", step)

    def _open(self, step):
        from torch.utils.tensorboard import SummaryWriter

        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            (folder / "args.json").write_text(json.dumps(self.flags, indent=2) + "\n")
            keep_rows(folder / "metrics.jsonl", step)
        self.writers = [SummaryWriter(folder, purge_step=step + 1) for folder in self.folders]
        threading.excepthook = lambda _: None  # of TensorBoard's thread: never_fatal says it

    def log(self, step: int, rows: list[dict[str, float]]) -> None:
        """One row per seed. JSON has no NaN (a chart of games when none ended, say): null"""
        for folder, writer, row in zip(self.folders, self.writers, rows, strict=True):
            finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
            try:
                with open(folder / "metrics.jsonl", "a") as file:
                    file.write(json.dumps({"steps": step, **finite}) + "\n")
            except OSError as error:
                saved = (self.folders[0] / "checkpoint.pt").exists()
                kept = ", the last checkpoint is safe" if saved else ""
                path = folder / "metrics.jsonl"
                raise UserError(f"could not write {path}{kept}: {error.strerror}") from error
            with never_fatal("write to TensorBoard"):
                for name, value in row.items():
                    if math.isfinite(value):
                        writer.add_scalar(name, value, step)

    def save(self, content: dict) -> None:
        """Written aside and renamed: what stands there is always whole, also after a power cut. A
        checksum follows the archive."""
        path = self.folders[0] / "checkpoint.pt"
        content = {**content, "folders": [folder.name for folder in self.folders]}
        try:
            torch.save(content, f"{path}.part")
            with open(f"{path}.part", "r+b") as file:
                file.write(hashlib.file_digest(file, "sha256").digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.part", path)
        except (OSError, RuntimeError) as error:  # torch takes a full disk for a RuntimeError
            earlier = ", an earlier one there is untouched" if path.exists() else ""
            reason = str(error).splitlines()[0]
            raise UserError(f"could not write {path}{earlier}: {reason}") from error

    def close(self) -> None:
        for writer in self.writers:
            with never_fatal("write to TensorBoard"):
                writer.close()
        threading.excepthook = threading.__excepthook__


def new_folders(args, label: str) -> list[Path]:
    """One per seed, made here: of runs that begin in the same second each gets its own"""
    run_dir = Path(args.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    seeds = range(args.seed, args.seed + args.num_seeds)
    for stamp in itertools.count(int(time.time())):
        folders = [run_dir / f"{args.exp_name}__{label}__{seed}__{stamp}" for seed in seeds]
        if not any(run_dir.glob(f"*__{stamp}")) and make_all(folders):
            return folders


def make_all(folders: list[Path]) -> bool:
    """Makes them all, or none if another process was faster with one"""
    made = []
    try:
        for folder in folders:
            folder.mkdir()
            made.append(folder)
    except FileExistsError:
        for folder in made:
            folder.rmdir()
        return False
    return True


def resumed_folders(args, checkpoint: dict) -> list[Path]:
    """Where the checkpoint lies, also if it was moved or copied"""
    first = Path(args.resume).resolve().parent
    names = checkpoint["folders"]
    if first.name != names[0]:
        seeds = range(args.seed, args.seed + args.num_seeds)
        names = [f"{first.name}__{seed}" for seed in seeds]
    return [first, *(first.parent / name for name in names[1:])]


def keep_rows(path: Path, last_step: int) -> None:
    """Drops what was logged after the checkpoint, and what a killed run wrote only half"""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            if json.loads(line)["steps"] <= last_step:
                kept.append(line + "\n")
    Path(f"{path}.part").write_text("".join(kept))
    os.replace(f"{path}.part", path)


def load_checkpoint(path: str | Path, expected: str) -> dict:
    """path: the checkpoint, or the run folder of any seed; expected: its format"""
    path = find_checkpoint(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    damaged = hashlib.sha256(data[:-32]).digest() != data[-32:]
    start = f"{path} ({len(data)} bytes) is damaged, cut short or no checkpoint"
    refuse(damaged, f"{start}: its checksum is wrong")
    saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    what = f"it is {saved['format']!r}, not {expected!r}"
    refuse(saved["format"] != expected, f"{path} is no checkpoint of this script: {what}")
    return saved


def flag(name: str) -> str:
    """As it is typed"""
    return f"--{name.replace('_', '-')}"


def check_resume(args, saved, may_change: tuple[str, ...]) -> None:
    """Refuses flags that differ from those of the run that goes on, but for those that may"""
    saved_flags = vars(saved) | vars(saved.config)
    changeable = ", ".join(map(flag, may_change))
    for name, value in (vars(args) | vars(args.config)).items():
        was = saved_flags[name]
        if name not in ("config", "device", "resume", *may_change) and value != was:
            start = f"{flag(name)} {value}: the resumed run has {was}"
            raise UserError(f"{start}; only {changeable} may change")


@contextlib.contextmanager
def stop_requests():
    """-> a list that SIGINT (Ctrl-C) or SIGTERM adds itself to; a second one ends the process at
    once"""
    asked = []
    handlers = {}

    def ask(number, _):
        asked.append(number)
        os.write(2, b"\nstopping after this iteration; once more: at once\n")
        for each in handlers:
            signal.signal(each, signal.SIG_DFL)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# Watch a game


@dataclasses.dataclass
class Args:
    seats: str | None = None  # who sits where: mixed, a player or a stranger (None: mixed everywhere)
    gif: str | None = None  # also write the game to this GIF file
    seed: Whole = 1  # seed of all randomness
    config: StagHuntConfig = StagHuntConfig()


def parse_args(words: list[str]) -> Args:
    flat = (tyro.conf.OmitArgPrefixes,)
    return tyro.cli(Args, args=words, config=flat, description=__doc__)


def main(args: Args) -> dict:
    """Shows a game."""
    check_ranges(args)
    config = args.config
    torch.manual_seed(args.seed)
    env = StagHuntEnv(config, seed=args.seed)
    table = ["mixed"] * config.num_players if args.seats is None else args.seats
    seats = Seats(env, [table])
    refuse(seats.num_learners > 0, "--seats learner: nobody learns here; name a player, or mixed")
    if args.gif is not None:
        check_gif(args.gif)

    names = [seats.names[kind] for kind in seats.kinds[0].tolist()]
    who = "  ".join(f"{i} {name}" for i, name in enumerate(names))
    print(f"{who}   (S stag, h hare, # wall)")
    state = env.initial_state()
    returns = torch.zeros(1, config.num_players)
    frames = []
    done = False
    while not done:
        print(render_ansi(config, state, returns), flush=True)
        actions = sample(seats.action_probs(state))
        frames.append(render_rgb(config, state, returns, names=names, hunting=actions[0]))
        if sys.stdout.isatty():
            time.sleep(0.25)
        state, reward, _, done = env.transition(state, actions)
        returns += reward
    print(render_ansi(config, state, returns))
    if args.gif is not None:
        frames.append(render_rgb(config, state, returns, names=names))
        write_gif(args.gif, frames)
    return {"returns": returns[0].tolist(), "length": int(state.time)}


def check_gif(path: str) -> None:
    """Before the game is shown, not after it"""
    refuse(Path(path).suffix != ".gif", f"--gif must name a file that ends with .gif, not {path!r}")
    try:
        open(path, "ab").close()
    except OSError as error:
        raise UserError(f"--gif: cannot write to {path!r}: {error.strerror}") from error


if __name__ == "__main__":
    command_line(parse_args, main)
