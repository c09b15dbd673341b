"""Stag Hunt: hunters on a grid choose between a stag that takes two and a hare that takes one. Thousands of games at once.

    python stag_hunt_env.py                              # watch a game in the terminal (--gif FILE also writes a GIF)
    python stag_hunt_env.py --audit                      # is any seat favoured? exit code 1 if so
    python stag_hunt_env.py --benchmark --device cuda    # env-steps per second

## The game

`num_players` hunters (seats), `num_stags` stags and `num_hares` hares stand on a `height` x `width` board. Prey do not
move and hunters do not block each other. All act at the same moment; moves happen before hunts.

| action | name      | legal when                                        | effect                        |
|--------|-----------|---------------------------------------------------|-------------------------------|
| 0      | up        | the cell above is on the board and no wall        | row - 1                       |
| 1      | down      | the cell below ...                                | row + 1                       |
| 2      | left      | the cell to the left ...                          | column - 1                    |
| 3      | right     | the cell to the right ...                         | column + 1                    |
| 4      | stay      | always; a player that has left has nothing else   | none                          |
| 5      | hunt stag | a living stag stands on the player's cell         | joins the party on that stag  |
| 6      | hunt hare | a living hare stands on the player's cell         | joins the party on that hare  |

An illegal action acts as stay.

| party              | payoff                                                      | afterwards                     |
|--------------------|-------------------------------------------------------------|--------------------------------|
| 1 on a stag        | nothing                                                     | everybody stays                |
| >= 2 on a stag     | `stag_reward`, shared in proportion to `strengths`          | the party and the stag leave   |
| >= 1 on a hare     | `hare_reward`, shared in proportion to `strengths`          | the party and the hare leave   |

So each player scores at most once a game. `time_reward` is added for every step that a player begins on the board;
`prosocial` then gives every player, also those who left, the mean reward of all.

| the game ends when                                   | set by                          |
|------------------------------------------------------|---------------------------------|
| everyone has left                                    | the rules                       |
| the clock reaches `final_time`                       | `final_time`                    |
| k steps have passed since the first catch (0: at it) | `steps_after_first_hunt = k`    |

Players see the clock, so each of these is a true end: never bootstrap from the state after it. A game that has ended
does not change any more: `transition` returns it as it is, with reward 0.

**Reset.** First walls: `max_wall_pieces` straight or L-shaped pieces of 3 or 4 cells, each laid at random among all the
places on the board, and left out if it would overlap another piece, cut the free cells in two or leave too little room.
Then prey, then players, each uniformly on a cell that nothing else stands on. `permute_ids` then deals the players'
starting places to the seats once more, in random order, so that "which seat" and "dealt when" can be told apart.

## What a player sees

uint8 planes `[num_players + 3, height, width]` of zeros and ones, in the player's **ego order**:

| plane           | player i sees                                             |
|-----------------|-----------------------------------------------------------|
| 0               | itself                                                    |
| k < num_players | seat (i + k) mod num_players; empty once that player left |
| num_players     | walls                                                     |
| num_players + 1 | living stags                                              |
| num_players + 2 | living hares                                              |

The clock `time / final_time` is a scalar beside them. `seats_to_ego` and `ego_to_seats` are the only places where seat
numbers turn into ego order and back.

## Rule-based players

| player         | on its way                                             | when there is no such prey |
|----------------|--------------------------------------------------------|----------------------------|
| `random`       | uniform over the legal actions                         |                            |
| `nearest_stag` | a shortest path to the nearest stag, then hunts it     | as `random`                |
| `nearest_hare` | a shortest path to the nearest hare, then hunts it     | as `random`                |
| `noisy_stag`   | as `nearest_stag`, one action in five as `random`      | as `random`                |
| `noisy_hare`   | as `nearest_hare`, one action in five as `random`      | as `random`                |
| `waiting`      | a shortest path to the nearest stag; never hunts       | stays                      |
| `switching`    | `nearest_stag` in one game, `nearest_hare` in the next | as `random`                |

The last four are strangers: only `--seats` and `--adapt-sets` of hopplus_ppo.py and hopplus_mcts.py know them. They are in
no pretraining, no `mixed` seat and no Bayesian guess, so that one can ask how learners fare with players nobody trained with.

## Arguments (`StagHuntConfig`)

| name                     | default | meaning                                                                      |
|--------------------------|---------|------------------------------------------------------------------------------|
| `height`, `width`        | 4, 4    | board size                                                                   |
| `num_players`            | 4       | 2 to 8                                                                       |
| `num_stags`, `num_hares` | 1, 4    | 0 or more of each                                                            |
| `final_time`             | 35      | steps until the game ends                                                    |
| `stag_reward`            | 10      | for the whole party                                                          |
| `hare_reward`            | 1       | for the whole party                                                          |
| `time_reward`            | 0       | per step while on the board                                                  |
| `strengths`              | None    | one positive number per seat; None: equal                                    |
| `prosocial`              | False   | everyone gets the mean reward                                                |
| `max_wall_pieces`        | 0       | walls tried at each reset                                                    |
| `steps_after_first_hunt` | None    | early end                                                                    |
| `permute_ids`            | False   | deal the starting places to the seats again, in random order                 |

## A worked example

Player 0 stands at the stag, on cell 1 of four, and hunts in vain until player 1 has walked past the hare to join it.

>>> env = StagHuntEnv(StagHuntConfig(height=1, width=4, num_players=2, num_hares=1), num_envs=1)
>>> def cells(*values): return torch.tensor([values], dtype=torch.int32)
>>> yes = torch.ones(1, 2, dtype=torch.bool)
>>> no_walls = torch.zeros(1, 4, dtype=torch.uint8)
>>> state = State(cells(1, 3), yes, cells(1, 2), yes, no_walls, cells(0)[0], cells(-1)[0])
>>> for actions in ([5, 2], [5, 2], [5, 5]):  # hunt and walk, hunt and walk, hunt together
...     state, reward, present_before, done = env.transition(state, torch.tensor([actions]))
...     print(state.position.tolist(), reward.tolist(), done.tolist())
[[1, 2]] [[0.0, 0.0]] [False]
[[1, 1]] [[0.0, 0.0]] [False]
[[1, 1]] [[5.0, 5.0]] [True]

## Version history

* v0: first version.
"""

import contextlib
import dataclasses
import io
import itertools
import math
import operator
import os
import random
import sys
import time
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
from pettingzoo import ParallelEnv

UP, DOWN, LEFT, RIGHT, STAY, HUNT_STAG, HUNT_HARE = range(7)
ACTION_NAMES = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")
NUM_ACTIONS = 7
FAR = 1 << 20  # a distance that no board has: there is no such prey
ALL_SEATS = slice(None)
NOISE = 0.2  # share of a noisy player's actions that are random


@dataclasses.dataclass(frozen=True)
class StagHuntConfig:
    height: int = 4
    """rows of the board"""
    width: int = 4
    """columns of the board"""
    num_players: int = 4
    """seats, 2 to 8"""
    num_stags: int = 1
    """stags at the start"""
    num_hares: int = 4
    """hares at the start"""
    final_time: int = 35
    """steps until the game ends"""
    stag_reward: float = 10.0
    """paid for a stag, shared by the party"""
    hare_reward: float = 1.0
    """paid for a hare, shared by the party"""
    time_reward: float = 0.0
    """added for each step that a player begins on the board"""
    strengths: tuple[float, ...] | None = None
    """each seat's weight when a party shares its prey (None: equal)"""
    prosocial: bool = False
    """give every player the mean reward of all"""
    max_wall_pieces: int = 0
    """wall pieces tried at each reset"""
    steps_after_first_hunt: int | None = None
    """end the game this many steps after the first catch (None: do not)"""
    permute_ids: bool = False
    """deal the starting places to the seats again, in random order, at every reset"""

    @property
    def num_prey(self) -> int:
        return self.num_stags + self.num_hares

    @property
    def num_cells(self) -> int:
        return self.height * self.width

    @property
    def observation_shape(self) -> tuple[int, int, int]:
        return self.num_players + 3, self.height, self.width

    @property
    def setting(self) -> str:
        """Short name: 4x4_4h1s is 4 hunters and 1 stag; the hares are named where there are not 4."""
        hares = "" if self.num_hares == 4 else f"_{self.num_hares}hares"
        return f"{self.height}x{self.width}_{self.num_players}h{self.num_stags}s{hares}"

    def payoffs(self) -> dict[float, str]:
        """Every reward that one player can get in one step while on the board -> what paid it: none, hare or stag (where two
        pay the same, the first of these)."""
        n, strengths = self.num_players, self.strengths or (1.0,) * self.num_players
        found = {}
        if self.prosocial:
            counts = itertools.product(range(self.num_stags + 1), range(self.num_hares + 1), range(1, n + 1))
            for stags, hares, active in counts:
                earned = stags * self.stag_reward + hares * self.hare_reward + active * self.time_reward
                found.setdefault(float(np.float32(earned / n)), "stag" if stags else "hare" if hares else "none")
            return found
        found[float(np.float32(self.time_reward))] = "none"
        for size, own in itertools.product(range(n), range(n)):
            for others in itertools.combinations([s for i, s in enumerate(strengths) if i != own], size):
                share = strengths[own] / (strengths[own] + sum(others))
                if self.num_hares:
                    found.setdefault(float(np.float32(share * self.hare_reward + self.time_reward)), "hare")
                if self.num_stags and size:
                    found.setdefault(float(np.float32(share * self.stag_reward + self.time_reward)), "stag")
        return found

    def checked(self) -> "StagHuntConfig":
        return StagHuntConfig(**dataclasses.asdict(self))

    def __post_init__(self):
        if self.height < 1 or self.width < 1:
            raise ValueError(f"the board must have at least 1x1 cells, not {self.height}x{self.width}")
        if not 2 <= self.num_players <= 8:
            raise ValueError(f"num_players must be 2 to 8, not {self.num_players}")
        if self.num_stags < 0 or self.num_hares < 0:
            raise ValueError(f"num_stags and num_hares must be >= 0, not {self.num_stags} and {self.num_hares}")
        needed = self.num_prey + self.num_players
        if needed > self.num_cells:
            raise ValueError(
                f"too little room: {self.num_prey} prey and {self.num_players} players need {needed} cells, "
                f"the {self.height}x{self.width} board has {self.num_cells}"
            )
        if self.final_time < 1:
            raise ValueError(f"final_time must be >= 1, not {self.final_time}")
        if self.strengths is not None and not (
            len(self.strengths) == self.num_players and all(0 < s < math.inf for s in self.strengths)
        ):
            raise ValueError(f"strengths must be {self.num_players} positive numbers, one per seat, not {self.strengths}")
        rewards = self.stag_reward, self.hare_reward, self.time_reward
        if not all(math.isfinite(reward) for reward in rewards):
            raise ValueError(f"stag_reward, hare_reward and time_reward must be finite, not {rewards}")
        if self.max_wall_pieces < 0:
            raise ValueError(f"max_wall_pieces must be >= 0, not {self.max_wall_pieces}")
        if self.steps_after_first_hunt is not None and self.steps_after_first_hunt < 0:
            raise ValueError(f"steps_after_first_hunt must be >= 0 or None, not {self.steps_after_first_hunt}")


@dataclasses.dataclass(frozen=True)
class StagHuntFlags(StagHuntConfig):
    """The same as command-line flags: checked by `checked()`, not while being parsed, so that an error is one plain line."""

    def __post_init__(self):
        pass


class State(NamedTuple):
    """B games. Cells are numbered row by row. A state with walls belongs to a config with max_wall_pieces > 0."""

    position: torch.Tensor  # [B, N] the cell of each seat; where it last stood once it has left
    present: torch.Tensor  # [B, N] still on the board
    prey_position: torch.Tensor  # [B, P] stags first
    prey_alive: torch.Tensor  # [B, P]
    walls: torch.Tensor  # [B, H*W] uint8, 1 where a wall stands
    time: torch.Tensor  # [B] steps played
    first_hunt: torch.Tensor  # [B] the clock right after the first catch, -1 before


# ---------------------------------------------------------------------------------------------------------------------
# The game


class StagHuntEnv:
    """`num_envs` games on one device.

    `initial_state`, `transition`, `observe`, `legal_actions` and `game_over` keep nothing but the random generator.
    `reset` and `step` play on: a game that ends is replaced at once, and what it left stays in `final_state`,
    `final_return` [B, N] and `final_length` [B] until the next game in that place ends.

    Everything on the device stays there, in the same memory, so `step` can be captured in a CUDA graph (register
    `generator` with it). For the same reason `step` overwrites `state`: copy what you want to keep, `copy_state(env.state)`.
    `compile=True` fuses the step with torch.compile.
    """

    def __init__(self, config: StagHuntConfig | None = None, num_envs: int = 1, device="cpu", seed: int = 0, compile=False):
        self.config = config = config or StagHuntConfig()
        self.device = checked_device(device)
        if num_envs < 1:
            raise ValueError(f"num_envs must be >= 1, not {num_envs}")
        self.num_envs = num_envs
        self.generator = torch.Generator(self.device)
        height, width, n, cells = config.height, config.width, config.num_players, config.num_cells

        def tensor(values, dtype=torch.float32):
            return torch.tensor(values, dtype=dtype, device=self.device)

        row, column = np.divmod(np.arange(cells), width)
        on_board = np.stack([row > 0, row < height - 1, column > 0, column < width - 1], 1)
        reach = np.pad(on_board * np.array([-width, width, -1, 1]), ((0, 0), (0, 3)))
        self.target = tensor(np.arange(cells)[:, None] + reach, torch.int64)  # [H*W, 7] where an action leads
        self.possible = tensor(np.pad(on_board, ((0, 0), (0, 3))), torch.bool)  # [H*W, 7] moves that stay on the board
        self.manhattan = tensor(abs(row[:, None] - row) + abs(column[:, None] - column), torch.int32)  # [H*W, H*W]
        self.is_stay = tensor([action == STAY for action in range(NUM_ACTIONS)], torch.bool)
        self.hunt = tensor([-1] * 5 + [HUNT_STAG, HUNT_HARE], torch.int64)
        seat = np.arange(n)
        self.ego = tensor((seat[:, None] + seat) % n, torch.int64)  # [observer, k] -> seat
        self.unego = tensor((seat - seat[:, None]) % n, torch.int64)  # [observer, seat] -> k
        # A plane is moved in words of 8 cells where the board allows it: an eighth of the work.
        self.word = torch.int64 if cells % 8 == 0 else torch.uint8
        self.one_hot = tensor(np.eye(cells + 1, cells), torch.uint8).view(self.word)  # the last row is empty: not on the board
        is_stag = np.arange(config.num_prey) < config.num_stags
        self.hunt_action = tensor(np.where(is_stag, HUNT_STAG, HUNT_HARE), torch.int64)  # [P]
        self.party_needed = tensor(np.where(is_stag, 2, 1), torch.int64)  # [P]
        self.prey_value = tensor(np.where(is_stag, config.stag_reward, config.hare_reward))  # [P]
        self.strengths = tensor(config.strengths or [1.0] * n)[:, None]  # [N, 1]
        if config.max_wall_pieces:
            self.pieces = tensor(wall_placements(height, width), torch.bool)  # [placements, H*W]
            # The longest shortest path: straight across, and around each piece (a piece of 4 has a rim of at most 14 cells).
            self.longest_path = min(cells - 1, height + width - 2 + 14 * config.max_wall_pieces)

        # New games come from a ring of 2B that are dealt in advance, half of B anew at each step. Nobody starts on prey, so a
        # game lasts at least 2 steps (unless final_time is 1), at most 2B end within 4 steps, and no deal is played twice.
        self.deals_per_step = math.ceil(num_envs / min(2, config.final_time))
        self._rows = math.gcd(num_envs, 1 << num_envs.bit_length() // 2)
        self._carried = [name for name in State._fields if name != "walls" or config.max_wall_pieces]
        if compile:
            self._advance, self._refill = (torch.compile(f, dynamic=False) for f in (self._advance, self._refill))
        self.state = None
        self.reset(seed)

    def seats_to_ego(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, ...] about seats -> [B, N observers, N, ...]: entry (i, k) is about seat (i + k) mod N."""
        return x[:, self.ego]

    def ego_to_seats(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N observers, N, ...] in ego order -> seat order: entry (i, j) is what observer i holds about seat j."""
        return x[:, self.ego[:, :1], self.unego]

    # -- pure functions of a state

    def initial_state(self, num_games: int | None = None) -> State:
        """Deals `num_games` (default: num_envs) games with numbers from `generator`."""
        return self._deal(self._deal_numbers(self.num_envs if num_games is None else num_games))

    def _deal_numbers(self, games):
        config = self.config
        things = config.max_wall_pieces + config.num_prey + config.num_players * (1 + config.permute_ids)
        return self._uniform(games, things)

    def _deal(self, uniform):
        config, games = self.config, len(uniform)
        sizes = [config.max_wall_pieces, config.num_prey + config.num_players, config.num_players * config.permute_ids]
        for_pieces, for_cells, for_seats = uniform.split(sizes, 1)
        walls = torch.zeros(games, config.num_cells, dtype=torch.bool, device=self.device)
        for k in range(config.max_wall_pieces):
            piece = self.pieces[(for_pieces[:, k] * len(self.pieces)).long()]
            candidate = walls | piece
            room = (~candidate).sum(1) >= sizes[1]
            fits = ~(walls & piece).any(1) & room & self._connected(~candidate)
            walls = torch.where(fits[:, None], candidate, walls)
        if config.max_wall_pieces:  # the numbers are places among the free cells
            below = (~walls).cumsum(1)
            place = _distinct(for_cells, below[:, -1:])
            cells = (below[:, None] <= place[..., None]).sum(2, dtype=torch.int32)
        else:
            cells = _distinct(for_cells, config.num_cells)
        prey_position, position = cells.split([config.num_prey, config.num_players], 1)
        if config.permute_ids:
            position = position.gather(1, _distinct(for_seats, config.num_players).long())
        clock = torch.zeros(games, dtype=torch.int32, device=self.device)
        return State(
            position.contiguous(),
            torch.ones_like(position, dtype=torch.bool),
            prey_position.contiguous(),
            torch.ones_like(prey_position, dtype=torch.bool),
            walls.to(torch.uint8),
            clock,
            clock - 1,
        )

    def legal_actions(self, state: State) -> torch.Tensor:
        """bool [B, N, 7]"""
        target = self.target[state.position]  # [B, N, 7]
        free = state.walls.gather(1, target.flatten(1)).view(target.shape) == 0
        move = self.possible[state.position] & free & state.present[..., None]
        prey = (self._on_prey(state) * self.hunt_action).sum(2)  # 0, or how to hunt what stands on the cell
        return move | self.is_stay | (self.hunt == prey[..., None])

    def transition(self, state: State, actions: torch.Tensor) -> tuple[State, torch.Tensor, torch.Tensor, torch.Tensor]:
        """actions int [B, N] -> next state, reward [B, N], present_before [B, N] (acted in this step), done [B]. No reset.
        What cannot change, walls and the prey's places, is shared with the state that was given.

        Wrong shapes, types and values raise ValueError, except that values on a GPU are not read back: there, an action
        outside 0..6 acts as stay."""
        self._check_actions(actions, state)
        return self._transition(state, actions)

    def _transition(self, state, actions):
        config = self.config
        ended = self.game_over(state)
        active = state.present & ~ended[:, None]
        actions = torch.where(active & (actions >= 0) & (actions < NUM_ACTIONS), actions, STAY).long()
        target = self.target[state.position, actions]
        position = torch.where(state.walls.gather(1, target) == 0, target, state.position).to(torch.int32)
        hunting = self._on_prey(state) & (actions[..., None] == self.hunt_action)  # [B, N, P]
        caught = hunting.sum(1) >= self.party_needed  # [B, P]
        success = hunting & caught[:, None]
        if config.prosocial:
            earned = (caught * self.prey_value).sum(1) + active.sum(1) * config.time_reward
            reward = (earned / config.num_players)[:, None].repeat(1, config.num_players)
        else:
            party = (hunting * self.strengths).sum(1, keepdim=True)  # [B, 1, P]
            share = success * (self.strengths * self.prey_value) / torch.where(party > 0, party, 1.0)
            reward = share.sum(2) + active * config.time_reward
        clock = state.time + (~ended).to(torch.int32)
        first = caught.any(1) & (state.first_hunt < 0)
        state = State(
            position,
            state.present & ~success.any(2),
            state.prey_position,
            state.prey_alive & ~caught,
            state.walls,
            clock,
            torch.where(first, clock, state.first_hunt),
        )
        return state, reward, active, self.game_over(state)

    def game_over(self, state: State) -> torch.Tensor:
        """bool [B]"""
        over = ~state.present.any(1) | (state.time >= self.config.final_time)
        if self.config.steps_after_first_hunt is not None:
            over |= (state.first_hunt >= 0) & (state.time - state.first_hunt >= self.config.steps_after_first_hunt)
        return over

    def observe(self, state: State) -> torch.Tensor:
        """uint8 [B, N, C, H, W]: each player's planes in its ego order"""
        return self._unpack(self._planes(state))

    def _unpack(self, words):
        return words.view(torch.uint8).view(*words.shape[:2], *self.config.observation_shape)

    def _planes(self, state):  # [B, N, C, words]
        config, n = self.config, self.config.num_players
        nowhere = config.num_cells
        players = torch.where(state.present, state.position, nowhere)
        prey = self.one_hot[torch.where(state.prey_alive, state.prey_position, nowhere)]  # [B, P, words]
        stags, hares = prey.split([config.num_stags, config.num_hares], 1)
        shared = torch.stack([state.walls.view(self.word), stags.sum(1, dtype=self.word), hares.sum(1, dtype=self.word)], 1)
        return torch.cat([self.one_hot[self.seats_to_ego(players)], shared[:, None].expand(-1, n, -1, -1)], 2)

    def clock(self, state: State) -> torch.Tensor:
        """float [B]: the share of the game's time that has passed"""
        return state.time / self.config.final_time

    def distance_to_prey(self, state: State, hunt_action: int) -> torch.Tensor:
        """int32 [B, H*W]: steps from each cell to the nearest living prey of that kind, around walls; FAR if there is none."""
        stags = self.config.num_stags
        kind = slice(0, stags) if hunt_action == HUNT_STAG else slice(stags, None)
        prey, alive = state.prey_position[:, kind], state.prey_alive[:, kind]
        if prey.shape[1] == 0:
            return torch.full_like(state.walls, FAR, dtype=torch.int32)
        distance = torch.where(alive[..., None], self.manhattan[prey], FAR).amin(1)
        if self.config.max_wall_pieces:
            distance = torch.where(distance == 0, 0, FAR)
            for _ in range(self.longest_path):
                step = distance[:, self.target[:, :4]].amin(2) + 1
                distance = torch.where(state.walls > 0, FAR, torch.minimum(distance, step)).clamp(max=FAR)
        return distance

    # -- play with automatic reset

    def reset(self, seed: int | None = None) -> torch.Tensor:
        """Deals all games anew, from `seed` if one is given; returns the observation."""
        if seed is not None:
            self.generator.manual_seed(seed)
        games, n = self.num_envs, self.config.num_players
        if self.state is None:
            self.state, self.final_state = self.initial_state(), self.initial_state()
            self._ring = self.initial_state(2 * games)
            self._head, self._tail = (torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(2))
            self.episode_return, self.final_return = (torch.zeros(games, n, device=self.device) for _ in range(2))
            self.final_length = torch.zeros(games, dtype=torch.int32, device=self.device)
            return self.reset(seed)
        for kept, num_games in ((self.state, games), (self._ring, 2 * games)):
            _assign(kept, self.initial_state(num_games))
        _assign(self.final_state, self.state)
        for counter in (self._head, self._tail, self.episode_return, self.final_return, self.final_length):
            counter.zero_()
        return self.observe(self.state)

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """actions int [B, N] -> observation [B, N, C, H, W] (the new game's where one ended), reward, present_before, done."""
        self._check_actions(actions, self.state)
        words, reward, present_before, done = self._advance(actions)
        self._refill(self._deal_numbers(self.deals_per_step))
        return self._unpack(words), reward, present_before, done

    def _advance(self, actions):
        state, reward, present_before, done = self._transition(self.state, actions)
        ended = done[:, None]
        total = self.episode_return + reward
        self.episode_return.copy_(torch.where(ended, 0.0, total))
        self.final_return.copy_(torch.where(ended, total, self.final_return))
        self.final_length.copy_(torch.where(done, state.time, self.final_length))
        # How many games have ended up to each, in two short sums: as one long sum it would leave most of a GPU idle.
        ends = done.view(-1, self._rows).long().cumsum(1)
        counts = (ends + (ends[:, -1:].cumsum(0) - ends[:, -1:])).flatten()
        slot = self._wrap(self._head + counts - done.long())
        for name in self._carried:
            new, now, last, ring = (getattr(x, name) for x in (state, self.state, self.final_state, self._ring))
            rows = done if new.dim() == 1 else ended
            last.copy_(torch.where(rows, new, last))
            now.copy_(torch.where(rows, ring[slot], new))
        self._head.copy_(self._wrap(self._head + counts[-1]))
        return self._planes(self.state), reward, present_before, done

    def _refill(self, uniform):
        deals, slot = self._deal(uniform), self._wrap(self._tail + torch.arange(self.deals_per_step, device=self.device))
        for name in self._carried:
            getattr(self._ring, name)[slot] = getattr(deals, name)
        self._tail.copy_(self._wrap(self._tail + self.deals_per_step))

    def tensors(self) -> list[torch.Tensor]:
        """All that `step` changes besides `generator`: save copies, and write them back with `copy_` to go on from there."""
        counters = [self._head, self._tail, self.episode_return, self.final_return, self.final_length]
        return [*self.state, *self.final_state, *self._ring, *counters]

    def _wrap(self, slot):
        size = 2 * self.num_envs
        return torch.where(slot < size, slot, slot - size)

    def final_observation(self) -> torch.Tensor:
        """uint8 [B, N, C, H, W]: the last observation of the last game that ended in each place"""
        return self.observe(self.final_state)

    # -- parts

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def _on_prey(self, state):  # [B, N, P]
        here = state.position[..., None] == state.prey_position[:, None]
        return here & state.prey_alive[:, None] & state.present[..., None]

    def _connected(self, free):  # [B, H*W] -> [B]: can every free cell be reached from the first?
        reached = free & (free.cumsum(1) == 1)
        for _ in range(self.longest_path):
            reached = free & (reached | reached[:, self.target[:, :4]].any(2))
        return (reached == free).all(1)

    def _check_actions(self, actions, state):
        if not isinstance(actions, torch.Tensor):
            raise ValueError(f"actions must be a tensor, not {type(actions).__name__}")
        if actions.shape != state.position.shape:
            raise ValueError(f"actions must have shape {list(state.position.shape)}, not {list(actions.shape)}")
        if actions.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            raise ValueError(f"actions must be integers, not {actions.dtype}")
        if actions.device.type != self.device.type:
            raise ValueError(f"actions must be on {self.device}, not on {actions.device}")
        if actions.device.type == "cpu" and not 0 <= actions.min() <= actions.max() < NUM_ACTIONS:
            raise ValueError(f"actions must be 0 to {NUM_ACTIONS - 1}, not {actions.min()} to {actions.max()}")


def copy_state(state: State) -> State:
    return State(*(x.clone() for x in state))


def _assign(kept: State, new: State) -> None:
    for a, b in zip(kept, new, strict=True):
        a.copy_(b)


def _distinct(uniform, n):
    """[B, K] uniform in [0, 1) -> [B, K] distinct numbers below n (an int or [B, 1]), in random order."""
    places = uniform.shape[1]
    number = (uniform * (n - torch.arange(places, device=uniform.device))).to(torch.int32)  # place among those not yet taken
    for k in reversed(range(places - 1)):
        later = number[:, k + 1 :]
        later += later >= number[:, k : k + 1]
    return number


def wall_placements(height: int, width: int) -> np.ndarray:
    """bool [placements, H*W]: every way to lay a straight or L-shaped piece of 3 or 4 cells on the board."""
    shapes = ["xxx", "xxxx", "xx\nx.", "xxx\nx..", "xxx\n..x"]
    found = set()
    for shape in shapes:
        piece = np.array([[c == "x" for c in line] for line in shape.split("\n")])
        for turned in (np.rot90(piece, turns) for turns in range(4)):
            for top in range(height - turned.shape[0] + 1):
                for left in range(width - turned.shape[1] + 1):
                    board = np.zeros((height, width), dtype=bool)
                    board[top : top + turned.shape[0], left : left + turned.shape[1]] = turned
                    found.add(board.tobytes())
    if not found:
        raise ValueError(f"max_wall_pieces must be 0: no piece of 3 cells fits on a {height}x{width} board")
    return np.stack([np.frombuffer(board, dtype=bool) for board in sorted(found)])


def checked_device(device) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}") from error
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ValueError(f"device {device} was asked for, but torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
    return device


# ---------------------------------------------------------------------------------------------------------------------
# Rule-based players. To add one, add a function to PLAYER_PROBS; one that nobody may train with, to STRANGER_PROBS.


def random_probs(env: StagHuntEnv, state: State, seat: int | slice) -> torch.Tensor:
    """Uniform over the legal actions."""
    return _uniform_over(env.legal_actions(state)[:, seat])


def nearest_stag_probs(env: StagHuntEnv, state: State, seat: int | slice) -> torch.Tensor:
    """Walks a shortest path to the nearest living stag, hunts it on arrival, and plays like `random` when there is none."""
    return _hunter_probs(env, state, seat, HUNT_STAG)


def nearest_hare_probs(env: StagHuntEnv, state: State, seat: int | slice) -> torch.Tensor:
    """Walks a shortest path to the nearest living hare, hunts it on arrival, and plays like `random` when there is none."""
    return _hunter_probs(env, state, seat, HUNT_HARE)


def _hunter_probs(env, state, seat, hunt_action):
    # Ties: uniform over all first steps of all shortest paths to all nearest prey.
    legal = env.legal_actions(state)[:, seat]
    best = legal & (_leads_closer(env, state, seat, hunt_action) | (env.hunt == hunt_action))
    return _uniform_over(torch.where(best.any(-1, keepdim=True), best, legal))


def _leads_closer(env, state, seat, hunt_action):  # bool [B, 7] or [B, seats, 7], also of who has left
    here, distance = state.position[:, seat].long(), env.distance_to_prey(state, hunt_action)
    now = distance.gather(1, here.view(len(here), -1)).view(here.shape)
    target = env.target[here]
    return distance.gather(1, target.flatten(1)).view(target.shape) < now[..., None]


def noisy_stag_probs(env: StagHuntEnv, state: State, seat: int | slice) -> torch.Tensor:
    """As `nearest_stag`, but one action in five as `random`."""
    return NOISE * random_probs(env, state, seat) + (1 - NOISE) * nearest_stag_probs(env, state, seat)


def noisy_hare_probs(env: StagHuntEnv, state: State, seat: int | slice) -> torch.Tensor:
    """As `nearest_hare`, but one action in five as `random`."""
    return NOISE * random_probs(env, state, seat) + (1 - NOISE) * nearest_hare_probs(env, state, seat)


def waiting_probs(env: StagHuntEnv, state: State, seat: int | slice) -> torch.Tensor:
    """Walks a shortest path to the nearest living stag and stays on its cell, but never hunts. Stays when there is none."""
    walks = env.legal_actions(state)[:, seat] & _leads_closer(env, state, seat, HUNT_STAG)
    return _uniform_over(torch.where(walks.any(-1, keepdim=True), walks, env.is_stay))


def _uniform_over(allowed):
    return allowed / allowed.sum(-1, keepdim=True)


def sample(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[..., A] -> int64 [...]. Never draws an action of probability 0."""
    noise = torch.empty_like(probs).exponential_(generator=generator)  # whose clock rings first, at rates probs
    noise.clamp_(min=torch.finfo(noise.dtype).tiny)  # never 0: argmax takes 0 / 0 for the largest
    return (probs / noise).argmax(-1)


def pick(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The action whose stretch of [0, 1) holds `uniform`."""
    *below, total = itertools.accumulate(probs.unbind(-1))
    return sum(edge <= uniform * total for edge in below)


# (env, state, seat) -> probabilities [B, 7]; seat may be a slice of seats, then [B, seats, 7]
PLAYER_PROBS: dict[str, Callable] = {
    "random": random_probs,
    "nearest_stag": nearest_stag_probs,
    "nearest_hare": nearest_hare_probs,
}
# The same, of players that learners may meet but that nobody trains with
STRANGER_PROBS: dict[str, Callable] = {
    "noisy_stag": noisy_stag_probs,
    "noisy_hare": noisy_hare_probs,
    "waiting": waiting_probs,
}
STRANGERS = (*STRANGER_PROBS, "switching")  # whose rule goes by the number of the game, which a state does not hold


def _player(probs):
    return lambda env, state, seat, generator: sample(probs(env, state, seat), generator)


# (env, state, seat, generator) -> actions [B], or [B, seats]
PLAYERS: dict[str, Callable] = {name: _player(probs) for name, probs in PLAYER_PROBS.items()}


def seat_probs(env: StagHuntEnv, state: State, kinds: torch.Tensor) -> torch.Tensor:
    """[B, N, 7] when seat (b, i) is played by number kinds[b, i] of PLAYER_PROBS."""
    table = torch.stack([probs(env, state, ALL_SEATS) for probs in PLAYER_PROBS.values()], 2)  # [B, N, kinds, 7]
    return table.gather(2, kinds[..., None, None].expand(-1, -1, 1, NUM_ACTIONS)).squeeze(2)


def check_players(names: list[str] | tuple[str, ...], also: tuple[str, ...] = ()) -> None:
    known = (*PLAYER_PROBS, *also)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown player {name!r}; the known ones are {', '.join(known)}")


def check_seats(seats: list[str] | tuple[str, ...], num_players: int, also: tuple[str, ...] = ()) -> tuple[str, ...]:
    check_players(seats, also)
    if len(seats) != num_players:
        raise ValueError(f"{len(seats)} seats are named ({', '.join(seats)}), but the game has {num_players} players")
    return tuple(seats)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures

COLOURS = (
    (214, 69, 65), (52, 120, 200), (240, 180, 41), (130, 85, 180),
    (30, 160, 150), (235, 120, 50), (220, 90, 150), (90, 90, 100),
)  # fmt: skip
ANSI_COLOURS = (196, 33, 220, 135, 37, 208, 205, 245)
INK = {
    "b": (110, 70, 35), "B": (165, 110, 60), "k": (40, 30, 25), "w": (245, 240, 230), "g": (165, 160, 155),
    "p": (225, 150, 150), "s": (238, 200, 165), "d": (120, 116, 110), "D": (150, 146, 140),
}  # fmt: skip
SPRITES = {
    "stag": [
        ".b.b....b.b.", ".bbb....bbb.", "..bb....bb..", "...bb..bb...", ".BB.BBBB.BB.", "..BBBBBBBB..", "...BkBBkB...",
        "...BBBBBB...", "....BBBB....", "....BBBB....", "....BkkB....", ".....BB.....",
    ],
    "hare": [
        "...gg..gg...", "..ggpggpgg..", "..gpggggpg..", "..gpg..gpg..", "...gg..gg...", "..wwwwwwww..", ".wwkwwwwkww.",
        ".wwwwwwwwww.", ".wwwwppwwww.", "..wwwkkwww..", "...wwwwww...", "............",
    ],
    "hunter": ["..cc..", ".cssc.", ".ckkc.", "cccccc", "cccccc", ".c..c."],
    "wall": ["dddddd" * 3] + (["DDDDDDDDd" * 2] * 4 + ["dddddd" * 3] + ["DDDDdDDDD" * 2] * 4 + ["dddddd" * 3]) * 2,
}  # fmt: skip
DIGITS = dict(zip("0123456789.-", (  # 3 x 5 bits, row by row
    0b111101101101111, 0b010110010010111, 0b111001111100111, 0b111001111001111, 0b101101111001001, 0b111100111001111,
    0b111100111101111, 0b111001001001001, 0b111101111101111, 0b111101111001111, 0b000000000000010, 0b000000111000000,
), strict=True))  # fmt: skip
CELL, SCALE = 18, 3  # dots to a cell, pixels to a dot


def render_ansi(config: StagHuntConfig, state: State, returns: torch.Tensor | None = None, game: int = 0) -> str:
    """One game as coloured text: digits are players, S a stag, h a hare."""
    content = [_contents(config, state, game, cell) for cell in range(config.num_cells)]
    lines, width = [], max(4, *(1 + len(here) for _, here in content))
    edge = "─" * width
    for row in range(config.height):
        lines.append(("├" + "┼".join([edge] * config.width) + "┤") if row else ("╭" + "┬".join([edge] * config.width) + "╮"))
        line = "│"
        for cell in range(row * config.width, (row + 1) * config.width):
            prey, here = content[cell]
            text = {"stag": "\033[1;38;5;130mS", "hare": "\033[1;38;5;250mh", None: " "}[prey]
            text += "".join(f"\033[1;38;5;{ANSI_COLOURS[i]}m{i}" for i in here)
            pad = " " * (width - 1 - len(here))
            line += ("\033[48;5;240m" + " " * width if bool(state.walls[game, cell]) else text + pad) + "\033[0m│"
        lines.append(line)
    lines.append("╰" + "┴".join([edge] * config.width) + "╯")
    scores = [0.0] * config.num_players if returns is None else returns[game].tolist()
    players = "  ".join(f"\033[1;38;5;{ANSI_COLOURS[i]}m{i}\033[0m {score:.4g}" for i, score in enumerate(scores))
    return "\n".join(lines) + f"\nt={int(state.time[game])}/{config.final_time}   {players}"


def render_rgb(config: StagHuntConfig, state: State, returns: torch.Tensor | None = None, game: int = 0) -> np.ndarray:
    """One game as a picture, uint8 [height, width, 3]: the board, and below it the clock and each player's return."""
    per_line = max(1, config.width * CELL // 26)  # scores below each other where the board is narrow
    score_lines = math.ceil(config.num_players / per_line)
    canvas = np.full((config.height * CELL + 6 + 9 * score_lines, max(config.width * CELL, 27), 3), 250, dtype=np.uint8)
    for cell in range(config.num_cells):
        y, x = (CELL * v for v in divmod(cell, config.width))
        canvas[y : y + CELL, x : x + CELL] = (176, 205, 130) if (y + x) // CELL % 2 else (186, 213, 142)
        if bool(state.walls[game, cell]):
            _draw(canvas, SPRITES["wall"][:CELL], y, x)
        prey, here = _contents(config, state, game, cell)
        if prey:
            _draw(canvas, SPRITES[prey], y + 3, x + 3)
        if len(here) == 1 and prey is None:  # alone: twice the size
            double = ["".join(c * 2 for c in line) for line in SPRITES["hunter"] for _ in range(2)]
            _draw(canvas, double, y + 3, x + 3, COLOURS[here[0]])
        else:  # in company: around the rim
            for i, place in zip(here, ((0, 0), (2, 2), (0, 2), (2, 0), (1, 0), (1, 2), (2, 1), (0, 1)), strict=False):
                _draw(canvas, SPRITES["hunter"], y + 6 * place[0], x + 6 * place[1], COLOURS[i])
    bottom = config.height * CELL
    canvas[bottom : bottom + 4] = (215, 210, 200)
    canvas[bottom : bottom + 4, : round(canvas.shape[1] * int(state.time[game]) / config.final_time)] = (90, 130, 80)
    for i in range(config.num_players):
        y, x = bottom + 6 + 9 * (i // per_line), 26 * (i % per_line) + 1
        _draw(canvas, SPRITES["hunter"], y, x, COLOURS[i])
        for k, symbol in enumerate(f"{0.0 if returns is None else float(returns[game, i]):.1f}"[:4]):
            bits = f"{DIGITS[symbol]:015b}".replace("0", ".").replace("1", "k")
            _draw(canvas, [bits[3 * row : 3 * row + 3] for row in range(5)], y + 1, x + 8 + 4 * k)
    return canvas.repeat(SCALE, 0).repeat(SCALE, 1)


def _contents(config, state, game, cell):  # -> "stag", "hare" or None, and the seats on the cell
    prey = None
    for p in range(config.num_prey):
        if bool(state.prey_alive[game, p]) and int(state.prey_position[game, p]) == cell:
            prey = "stag" if p < config.num_stags else "hare"
    here = state.present[game] & (state.position[game] == cell)
    return prey, [i for i in range(config.num_players) if bool(here[i])]


def _draw(canvas, sprite, top, left, colour=None):
    for y, line in enumerate(sprite):
        for x, c in enumerate(line):
            if c != "." and top + y < canvas.shape[0] and left + x < canvas.shape[1]:
                canvas[top + y, left + x] = colour if c == "c" else INK[c]


def write_gif(path: str, frames: list[np.ndarray], fps: float = 4) -> None:
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    durations = [round(1000 / fps)] * (len(images) - 1) + [1500]
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)


# ---------------------------------------------------------------------------------------------------------------------
# Wrappers: one game, numpy in and out

RENDERERS = {"ansi": render_ansi, "rgb_array": render_rgb}
HUNTERS = {"random": None, "nearest_stag": HUNT_STAG, "nearest_hare": HUNT_HARE}  # what each looks for


class StagHuntParallelEnv(ParallelEnv):
    """PettingZoo wrapper: agent player_i sits in seat i. `seats` may put rule-based players in some of the seats.

    The game is set by a StagHuntConfig, a dict of its fields or keywords: `StagHuntParallelEnv(height=5, width=5)`. Who
    has left stays an agent, with one legal action. The end is a termination, never a truncation. It also comes once all
    agents have left rule-based players behind, unless `prosocial`: then they still get rewards.

    The rules stand here once more in plain Python, because a torch operation takes 5 us however small the batch. The
    batched game deals, and tests/test_wrappers.py compares every step with it.
    """

    metadata: ClassVar = {"name": "stag_hunt_v0", "render_modes": list(RENDERERS), "render_fps": 4}

    def __init__(self, config: StagHuntConfig | dict | None = None, render_mode=None, seats=None, **fields):
        given = dataclasses.asdict(config) if isinstance(config, StagHuntConfig) else config or {}
        self.config = StagHuntConfig(**{**given, **fields})
        if render_mode not in (None, *RENDERERS):
            raise ValueError(f"unknown render_mode {render_mode!r}; the known ones are {', '.join(RENDERERS)}")
        n, (planes, height, width) = self.config.num_players, self.config.observation_shape
        seats = seats.split(",") if isinstance(seats, str) else seats or ["learner"] * n
        self.seats, self.render_mode = check_seats(seats, n, also=("learner",)), render_mode
        self.seat = {f"player_{i}": i for i, name in enumerate(self.seats) if name == "learner"}
        self.possible_agents, self.agents = list(self.seat), []
        self.core, self.random, self.deals, self.time = StagHuntEnv(self.config), random.Random(), [], None
        self.core.generator.seed()  # games differ from one environment to the next until reset(seed=...)
        self.target, self.ego = self.core.target.tolist(), self.core.ego.tolist()
        seen = gymnasium.spaces.Dict(
            observation=gymnasium.spaces.Box(0, 1, (planes, height, width), np.uint8),
            action_mask=gymnasium.spaces.MultiBinary(NUM_ACTIONS),
            time=gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32),
        )
        self.observation_spaces = dict.fromkeys(self.seat, seen)
        self.action_spaces = {agent: gymnasium.spaces.Discrete(NUM_ACTIONS) for agent in self.seat}
        self.state_space = gymnasium.spaces.Box(0.0, 1.0, (planes + 1, height, width), np.float32)

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.core.generator.manual_seed(seed)
            self.random, self.deals = random.Random(int(seed)), []
        if not self.deals:  # 8 games take little longer to deal than one
            self.deals = list(zip(*(x.tolist() for x in self.core.initial_state(8)), strict=True))
        self.position, self.present, self.prey_position, _, self.walls, self.time, self.first_hunt = self.deals.pop()
        self.prey = dict(zip(self.prey_position, self.core.hunt_action.tolist(), strict=True))  # living: cell -> hunt
        self.returns, self.agents = [0.0] * len(self.seats), list(self.seat)
        return self._observe()

    def step(self, actions):
        if not self.agents:
            raise ValueError("no game is on: call reset first")
        if missing := [agent for agent in self.agents if agent not in actions]:
            raise ValueError(f"step needs an action for {', '.join(missing)}")
        chosen = {i: operator.index(actions[agent]) for agent, i in self.seat.items()}
        if not all(0 <= action < NUM_ACTIONS for action in chosen.values()):
            raise ValueError(f"actions must be 0 to {NUM_ACTIONS - 1}, not {list(chosen.values())}")
        rewards = self._play([chosen[i] if i in chosen else self._choose(i) for i in range(len(self.seats))])
        self.returns = [total + reward for total, reward in zip(self.returns, rewards, strict=True)]
        config, k = self.config, self.config.steps_after_first_hunt
        over = self.time >= config.final_time or (k is not None and 0 <= self.first_hunt <= self.time - k)
        over |= not any(self.present if config.prosocial else [self.present[i] for i in chosen])
        observations, infos = self._observe()
        ends, cuts = dict.fromkeys(self.seat, over), dict.fromkeys(self.seat, False)
        self.agents = [] if over else self.agents
        return observations, {agent: rewards[i] for agent, i in self.seat.items()}, ends, cuts, infos

    def _play(self, actions):  # of all seats -> rewards of all seats
        config, parties, strengths = self.config, {}, self.config.strengths or [1.0] * len(actions)
        rewards = [config.time_reward * here for here in self.present]
        for i, action in enumerate(actions):
            if action in self._legal(i):
                if action > STAY:
                    parties.setdefault(self.position[i], []).append(i)
                self.position[i] = self.target[self.position[i]][action]
        self.time += 1
        for cell, party in parties.items():
            if self.prey[cell] == HUNT_HARE or len(party) > 1:
                value = config.hare_reward if self.prey.pop(cell) == HUNT_HARE else config.stag_reward
                self.first_hunt = self.time if self.first_hunt < 0 else self.first_hunt
                for i in party:
                    rewards[i] += value * strengths[i] / sum(strengths[j] for j in party)
                    self.present[i] = False
        return [sum(rewards) / len(rewards)] * len(rewards) if config.prosocial else rewards

    def _legal(self, i):  # the legal actions of seat i
        here = self.position[i]
        if not self.present[i]:
            return [STAY]
        moves = [a for a, to in enumerate(self.target[here][:STAY]) if to != here and not self.walls[to]]
        return [*moves, STAY, self.prey[here]] if here in self.prey else [*moves, STAY]

    def _choose(self, i):  # the action of the rule-based player in seat i
        name, here, legal = self.seats[i], self.position[i], self._legal(i)
        if name not in HUNTERS:  # a player that somebody has added
            probs = PLAYER_PROBS[name](self.core, self._batch(), i)[0].tolist()
            return self.random.choices(range(NUM_ACTIONS), probs)[0]
        hunt = HUNTERS[name]
        steps = {cell: 0 for cell, kind in self.prey.items() if kind == hunt}  # from each cell to the nearest such prey
        queue = list(steps)
        for cell in queue:
            for to in self.target[cell][:STAY]:
                if to not in steps and not self.walls[to]:
                    steps[to] = steps[cell] + 1
                    queue.append(to)
        closer = [a for a in legal if steps and (a == hunt or steps[self.target[here][a]] < steps[here])]
        return self.random.choice(closer or legal)

    def _observe(self):  # observations, infos
        planes, n, found = self.state(), len(self.seats), {}
        for agent, i in self.seat.items():
            view, mask = planes[[*self.ego[i], n, n + 1, n + 2]].astype(np.uint8), np.zeros(NUM_ACTIONS, np.int8)
            mask[self._legal(i)] = 1
            found[agent] = {"observation": view, "action_mask": mask, "time": planes[-1, 0, :1].copy()}
        return found, {agent: {"action_mask": found[agent]["action_mask"]} for agent in found}

    def state(self) -> np.ndarray:
        """float32 [C + 1, H, W]: the planes in seat order, as seat 0 sees them, and one filled with the clock"""
        if self.time is None:
            raise ValueError("no game has begun: call reset before state")
        n, planes = len(self.seats), np.zeros((self.state_space.shape[0], self.config.num_cells), np.float32)
        planes[range(n), self.position] = self.present
        planes[n] = self.walls
        for cell, hunt in self.prey.items():
            planes[n + 1 + (hunt == HUNT_HARE), cell] = 1
        planes[n + 3] = self.time / self.config.final_time
        return planes.reshape(self.state_space.shape)

    def render(self):
        if self.time is None:
            raise ValueError("no game has begun: call reset before render")
        draw = RENDERERS.get(self.render_mode)
        return draw and draw(self.config, self._batch(), torch.tensor([self.returns]))

    def _batch(self):  # State, B = 1
        alive = [cell in self.prey for cell in self.prey_position]
        values = self.position, self.present, self.prey_position, alive, self.walls, self.time, self.first_hunt
        return State(*(torch.tensor([x], dtype=like.dtype) for x, like in zip(values, self.core.state, strict=True)))


class StagHuntGymEnv(gymnasium.Env):
    """Gymnasium wrapper `StagHunt-v0`: one seat is the learner's, rule-based players sit in the others. The episode
    ends when the learner has left, unless `prosocial`. Arguments as above: gymnasium.make("StagHunt-v0", height=5)."""

    metadata: ClassVar = {"render_modes": list(RENDERERS), "render_fps": 4}

    def __init__(self, config=None, seats="learner,nearest_stag,nearest_hare,random", render_mode=None, **fields):
        self.parallel_env, self.render_mode = StagHuntParallelEnv(config, render_mode, seats, **fields), render_mode
        if len(self.parallel_env.seat) != 1:
            raise ValueError(f"StagHunt-v0 needs exactly 1 learner among the seats, not {len(self.parallel_env.seat)}")
        ((self.agent, self.learner),) = self.parallel_env.seat.items()
        self.observation_space = self.parallel_env.observation_space(self.agent)
        self.action_space = self.parallel_env.action_space(self.agent)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return tuple(x[self.agent] for x in self.parallel_env.reset(seed))

    def step(self, action):
        return tuple(x[self.agent] for x in self.parallel_env.step({self.agent: action}))

    def action_masks(self) -> np.ndarray:
        """bool [7]: the name by which MaskablePPO of sb3-contrib asks"""
        return np.isin(range(NUM_ACTIONS), self.parallel_env._legal(self.learner))

    def render(self):
        return self.parallel_env.render()


if "StagHunt-v0" not in gymnasium.registry:
    gymnasium.register("StagHunt-v0", entry_point=f"{__name__}:StagHuntGymEnv")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


@dataclasses.dataclass
class Args:
    play: bool = False
    """show a game in the terminal (what happens when nothing else is asked for)"""
    audit: bool = False
    """measure whether any seat is favoured; exit code 1 if so"""
    benchmark: bool = False
    """measure env-steps per second with random legal actions and all observations written"""
    seats: str = "nearest_stag,nearest_stag,nearest_hare,random"
    """--play: who sits where, out of random, nearest_stag, nearest_hare"""
    fps: float = 4.0
    """--play: steps shown per second"""
    gif: str | None = None
    """--play: also write the game to this GIF file"""
    audit_games: int = 200_000
    """--audit: games for each row of the table"""
    batch_sizes: tuple[int, ...] = (4096, 65536, 524288)
    """--benchmark: games played at once (more than 100 000 only on a GPU)"""
    boards: tuple[str, ...] = ("4x4", "8x8")
    """--benchmark: boards, as HEIGHTxWIDTH"""
    compile: bool = True
    """--benchmark: fuse the step with torch.compile (CUDA only)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """--audit, --benchmark: where the games are played; auto: on the GPU if there is one"""
    seed: int = 1
    """seed of all randomness"""
    config: StagHuntFlags = dataclasses.field(default_factory=StagHuntFlags)


def play(args: Args) -> dict:
    seats = check_seats(args.seats.split(","), args.config.num_players)
    env = StagHuntEnv(args.config, num_envs=1, device="cpu", seed=args.seed)
    kinds = torch.tensor([[list(PLAYER_PROBS).index(name) for name in seats]])
    state, returns, done, frames = env.initial_state(), torch.zeros(1, len(seats)), False, []
    live = sys.stdout.isatty()
    print("  ".join(f"{i} {name}" for i, name in enumerate(seats)) + "   (S stag, h hare)")
    while True:
        text = render_ansi(args.config, state, returns)
        if live and frames:
            print(f"\033[{text.count(chr(10)) + 1}A\r", end="")
        print(text, flush=True)
        frames.append(render_rgb(args.config, state, returns))
        if done:
            break
        if live:
            time.sleep(1 / args.fps)
        state, reward, _, ended = env.transition(state, sample(seat_probs(env, state, kinds), env.generator))
        returns, done = returns + reward, bool(ended)
    if args.gif:
        write_gif(args.gif, frames, args.fps)
        print(f"wrote {args.gif}")
    return {"returns": returns[0].tolist(), "length": int(state.time)}


def audit(args: Args) -> dict:
    """Plays whole games by rule-based players and tests whether all seats have the same mean return."""
    n, device, table = args.config.num_players, resolve_device(args.device), []
    header = "".join(f"seat {i}".rjust(16) for i in range(n))
    print(f"mean return with 95 % interval, {args.audit_games} games a row")
    print(f"{'players':<14}{'permute_ids':<12}{header}{'p':>9}")
    for permute in (False, True):
        for number, players in enumerate(("random", "nearest_stag", "mixed")):
            config = dataclasses.replace(args.config, permute_ids=permute)
            env = StagHuntEnv(config, min(args.audit_games, 20_000), device, args.seed + 10 * number + permute)
            returns = torch.cat([_play_games(env, players) for _ in range(math.ceil(args.audit_games / env.num_envs))])
            returns = returns[: args.audit_games].double().cpu()
            mean, half = returns.mean(0), 1.96 * returns.std(0) / math.sqrt(len(returns))
            p = equal_means_p(returns)
            table.append({"players": players, "permute_ids": permute, "mean": mean.tolist(), "p": p})
            cells = "".join(f"{m:.4f} ± {h:.4f}".rjust(16) for m, h in zip(mean.tolist(), half.tolist(), strict=True))
            print(f"{players:<14}{permute!s:<12}{cells}{p:>9.3f}", flush=True)
    threshold = 0.01 / len(table)
    favoured = any(row["p"] < threshold for row in table)
    verdict = "A SEAT IS FAVOURED" if favoured else "no seat is favoured"
    print(f"{verdict} (Hotelling's test of equal means, significant below p = {threshold:.4f}: 0.01 over {len(table)} rows)")
    return {"table": table, "favoured": favoured}


def _play_games(env, players):  # -> returns [B, N]
    names = list(PLAYER_PROBS)
    shape = (env.num_envs, env.config.num_players)
    if players == "mixed":
        kinds = torch.randint(len(names), shape, generator=env.generator, device=env.device)
    state, returns = env.initial_state(), torch.zeros(shape, device=env.device)
    for _ in range(env.config.final_time):
        probs = seat_probs(env, state, kinds) if players == "mixed" else PLAYER_PROBS[players](env, state, ALL_SEATS)
        state, reward, _, _ = env.transition(state, sample(probs, env.generator))
        returns += reward
    return returns


def equal_means_p(returns: torch.Tensor) -> float:
    """p of equal seat means, [games, N]. Seats of one game depend on each other, hence Hotelling's T^2 of the
    differences, whose distribution is known also of few games."""
    from scipy import stats  # takes half a second to load

    difference = returns[:, 1:] - returns[:, :1]
    covariance = torch.cov(difference.T).reshape(difference.shape[1], -1) / len(difference)
    mean, freedom = difference.mean(0), int(torch.linalg.matrix_rank(covariance, hermitian=True))
    if freedom == 0:
        return 1.0 if bool((mean == 0).all()) else 0.0
    statistic = mean @ torch.linalg.pinv(covariance, hermitian=True) @ mean
    rest = len(returns) - freedom
    return float(stats.f.sf(float(statistic) * rest / (freedom * (len(returns) - 1)), freedom, rest))


def benchmark(args: Args, configs: list[StagHuntConfig]) -> dict:
    device = resolve_device(args.device)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    mode = ("compiled, " if args.compile else "") + "CUDA graph" if cuda else "eager"
    print(f"{name}, torch {torch.__version__}, {mode}; random legal actions, {args.config.num_players} observations written")
    print(f"{'board':<8}{'games':>9}{'us/step':>10}{'M env-steps/s':>16}{'M agent-steps/s':>17}{'GB/s of planes':>16}")
    table = []
    for config in configs:
        board = f"{config.height}x{config.width}"
        for games in args.batch_sizes:
            if games > 100_000 and not cuda:
                continue
            env = StagHuntEnv(config, games, device, args.seed, compile=args.compile and cuda)
            choose = torch.compile(_random_actions, dynamic=False) if args.compile and cuda else _random_actions

            def one_step(env=env, choose=choose):
                uniform = env._uniform(env.num_envs, env.config.num_players)
                return env.step(choose(env, uniform))

            seconds = _time_cuda(one_step, env) if cuda else _time_cpu(one_step)
            speed = games / seconds
            planes = speed * config.num_players * math.prod(config.observation_shape)
            table.append({"board": board, "games": games, "env_steps_per_second": speed})
            figures = f"{speed / 1e6:>16.2f}{speed * config.num_players / 1e6:>17.2f}{planes / 1e9:>16.1f}"
            print(f"{board:<8}{games:>9}{seconds * 1e6:>10.1f}{figures}", flush=True)
    return {"table": table}


def _random_actions(env, uniform):
    return pick(random_probs(env, env.state, ALL_SEATS), uniform)


def _time_cpu(one_step):
    """Median seconds a step, over 20 groups of steps, after warm-up."""
    for _ in range(5):
        one_step()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(5):
            one_step()
        times.append((time.perf_counter() - start) / 5)
    return float(np.median(times))


def _time_cuda(one_step, env, steps=10):
    """Median seconds a step, over 20 replays of a CUDA graph of `steps` steps, after warm-up."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            one_step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        for _ in range(steps):
            one_step()
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / steps)
    return float(np.median(times[5:]))


def parse_board(board: str) -> tuple[int, int]:
    height, cross, width = board.partition("x")
    if not (cross and height.isdecimal() and width.isdecimal()):
        raise ValueError(f"a board is written HEIGHTxWIDTH, for example 4x4, not {board!r}")
    return int(height), int(width)


def resolve_device(device: str) -> torch.device:
    return checked_device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


def main(args: Args) -> dict:
    resolve_device(args.device)
    args = dataclasses.replace(args, config=args.config.checked())
    if args.fps <= 0:
        raise ValueError(f"--fps must be > 0, not {args.fps}")
    if args.audit_games < 100:
        raise ValueError(f"--audit-games must be >= 100, not {args.audit_games}")
    if args.gif and not os.path.isdir(os.path.dirname(args.gif) or "."):
        raise ValueError(f"there is no folder {os.path.dirname(args.gif)} for --gif {args.gif}")
    boards = []
    if args.benchmark:  # its boards are its own; --height and --width belong to --play and --audit
        boards = [dataclasses.replace(args.config, height=h, width=w) for h, w in map(parse_board, args.boards)]
        if resolve_device(args.device).type == "cpu" and min(args.batch_sizes, default=0) > 100_000:
            raise ValueError(f"--batch-sizes {args.batch_sizes}: more than 100 000 games are measured only on a GPU")
    results = {}
    if args.play or args.gif or not (args.audit or args.benchmark):
        results |= play(args)
    if args.audit:
        results |= {"audit": audit(args)}
    if args.benchmark:
        results |= {"benchmark": benchmark(args, boards)}
    return results


def parse(args_type: type, words: list[str]):
    """The flags as a command line gives them; --flag and --no-flag also for those that may be None"""
    import tyro

    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(args_type) if field.type == bool | None}
    found = []
    for word, following in itertools.zip_longest(words, words[1:]):
        flag = word.replace("_", "-").replace("--no-", "--", 1)
        bare = flag in flags and following not in ("True", "False", "None")
        found += [flag, str(not word.startswith(("--no-", "--no_")))] if bare else [word]
    return tyro.cli(args_type, args=found, config=(tyro.conf.OmitArgPrefixes,))


def command_line(args_type: type, main: Callable) -> dict:
    """Parses the flags and runs main. Wrong flags and wrong input end with one line and exit code 2."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parse(args_type, sys.argv[1:])
    except SystemExit as stop:
        if stop.code:  # tyro explains itself in a box of several lines
            words = (line.strip("│╰╯─ ") for line in said.getvalue().splitlines() if not line.startswith("╭"))
            print("error: " + " ".join(word for word in words if word), file=sys.stderr)
        raise
    try:
        return main(args)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)


if __name__ == "__main__":
    outcome = command_line(Args, main)
    sys.exit(1 if outcome.get("audit", {}).get("favoured") else 0)
