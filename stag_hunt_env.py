"""Stag Hunt: hunters on a grid choose between a stag that takes two and a hare that takes one.

    python stag_hunt_env.py [--gif FILE]    # watch a game, and write it to a GIF

Hunters (seats), stags and hares stand on a `height` x `width` board. Prey do not move, hunters do
not block each other, and all act at the same moment. An illegal action acts as stay.

* 0 to 3, up, down, left, right: to the next cell, if it has no wall.
* 4, stay: always legal, and all that is legal for those who left.
* 5, hunt stag, on a living stag's cell: 2 or more share `stag_reward` and leave with it.
* 6, hunt hare, on a living hare's cell: 1 or more share `hare_reward` and leave with it.

A game ends when everyone has left, at `final_time`, or `steps_after_first_hunt` steps after the
first catch. Players see the clock, so this is a true end: never bootstrap from the state after it.
At reset up to `max_wall_pieces` walls of 3 or 4 cells are laid, straight or L-shaped, that neither
overlap nor cut the free cells in two.

A player sees the clock `time / final_time` and uint8 planes `[num_players + 3, height, width]` of
zeros and ones, in its **ego order**: plane k < num_players shows player i seat (i + k) mod
num_players, until that player leaves. Walls, living stags and living hares follow.

Rule-based players: `random` does any legal action; `nearest_stag` and `nearest_hare` walk to such
prey, by any shortest way, and hunt it; `first_stag` and `last_stag` hunt the living stag of the
lowest or highest cell number. Where there is no such prey they act as `random`.

StagHuntEnv plays many games at once, Seats says who sits where. For PettingZoo there is
StagHuntParallelEnv, for Gymnasium "stag_hunt_env:StagHunt-v0", for make and for make_vec.
"""

import dataclasses
import itertools
import math
from functools import cache, partial
from typing import ClassVar, NamedTuple

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from pettingzoo import ParallelEnv
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

UP, DOWN, LEFT, RIGHT, STAY, HUNT_STAG, HUNT_HARE = range(7)
ACTION_NAMES = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")
NUM_ACTIONS = 7
FAR = 1 << 20  # a distance that no board has: there is no such prey


@dataclasses.dataclass(frozen=True)
class StagHuntConfig:
    height: int = 4  # rows of the board
    width: int = 4  # columns of the board
    num_players: int = 4  # seats, 2 to 8
    num_stags: int = 1  # stags at the start
    num_hares: int = 4  # hares at the start
    final_time: int = 35  # steps until the game ends
    stag_reward: float = 10.0  # paid for a stag, shared by the party
    hare_reward: float = 1.0  # paid for a hare, shared by the party
    max_wall_pieces: int = 0  # wall pieces tried at each reset
    steps_after_first_hunt: int | None = None  # end the game this long after the first catch
    permute_ids: bool = False  # deal the starting cells to the seats once more

    def __post_init__(self):
        if not 2 <= self.num_players <= 8:
            raise ValueError(f"num_players must be 2 to 8, not {self.num_players}")
        if min(self.height, self.width, self.final_time) < 1:
            raise ValueError("height, width, final_time: at least 1")
        if min(self.num_stags, self.num_hares, self.max_wall_pieces) < 0:
            raise ValueError("num_stags, num_hares, max_wall_pieces: at least 0")
        needed = self.num_prey + self.num_players
        if needed > self.num_cells:
            raise ValueError(f"too little room: {needed} players and prey, {self.num_cells} cells")

    @property
    def num_prey(self) -> int:
        return self.num_stags + self.num_hares

    @property
    def num_cells(self) -> int:
        return self.height * self.width

    @property
    def num_wall_cells(self) -> int:
        """How many numbers say where walls stand: one 0 in a game without"""
        return self.num_cells if self.max_wall_pieces else 1

    @property
    def setting(self) -> str:
        """Such as 4x4_4h1s, or 8x8_4h1s_5walls"""
        walls = f"_{self.max_wall_pieces}walls" if self.max_wall_pieces else ""
        return f"{self.height}x{self.width}_{self.num_hares}h{self.num_stags}s{walls}"

    @property
    def observation_shape(self) -> tuple[int, int, int]:
        return self.num_players + 3, self.height, self.width

    def payoffs(self) -> dict[float, str]:
        """Every reward that a player can get in a step -> none, hare or stag paid it"""
        parties = range(self.num_players, 0, -1)
        stags = [(self.stag_reward / party, "stag") for party in parties if party > 1]
        hares = [(self.hare_reward / party, "hare") for party in parties]
        payoffs = stags * (self.num_stags > 0) + hares * (self.num_hares > 0) + [(0.0, "none")]
        return {float(np.float32(reward)): prey for reward, prey in payoffs}


class State(NamedTuple):
    """B games. Cells are numbered row by row."""

    position: Tensor  # [B, N] each seat's cell; where it last stood once it has left
    present: Tensor  # [B, N] still on the board
    prey_position: Tensor  # [B, P] stags first
    prey_alive: Tensor  # [B, P]
    walls: Tensor  # [B, H*W] uint8, 1 where a wall stands
    time: Tensor  # [B] steps played
    first_hunt: Tensor  # [B] the time right after the first catch, -1 before


class StagHuntEnv:
    """`num_envs` games on one device. `initial_state`, `transition`, `observe`, ... are functions
    of a state. `step` plays on from `state`, in place: a game that ends is replaced at once, and
    leaves `final_state`, `final_return` and `final_prey` [B, N] until the next one ends there.
    `step` can be captured in a CUDA graph (register `generator` with it)."""

    def __init__(self, config=None, num_envs=1, device="cpu", seed=0, compile=False):
        self.config = config = config or StagHuntConfig()
        self.device = torch.device(device)
        self.num_envs = num_envs
        self.generator = torch.Generator(self.device)
        height, width, players = config.height, config.width, config.num_players
        tensor = partial(torch.tensor, device=self.device)
        cell = np.arange(config.num_cells)
        row, column = np.divmod(cell, width)
        inside = row > 0, row < height - 1, column > 0, column < width - 1
        possible = np.pad(np.stack(inside, 1), ((0, 0), (0, 3)))
        target = cell[:, None] + possible * [-width, width, -1, 1, 0, 0, 0]
        distance = abs(row[:, None] - row) + abs(column[:, None] - column)
        self.possible = tensor(possible)  # [H*W, 7] moves that stay on the board
        self.target = tensor(target)  # [H*W, 7] where they lead
        self.manhattan = tensor(distance, dtype=torch.int32)  # [H*W, H*W]
        self.action = torch.arange(NUM_ACTIONS, device=self.device)
        if config.max_wall_pieces:
            self.pieces = tensor(wall_pieces(height, width))

        everybody = torch.arange(players + config.num_prey, device=self.device)
        seat, prey = everybody.split([players, config.num_prey])
        self.ego = (seat[:, None] + seat) % players  # [observer, k] -> seat
        self.unego = (seat - seat[:, None]) % players  # [observer, seat] -> k
        self.view_order = torch.cat([self.ego, prey.expand(players, -1)], 1)

        is_stag = prey < players + config.num_stags  # [P]
        self.hunt_action = torch.where(is_stag, HUNT_STAG, HUNT_HARE)
        self.party_needed = torch.where(is_stag, 2, 1)
        self.prey_value = torch.where(is_stag, config.stag_reward, config.hare_reward)
        # How many random numbers a deal takes for walls, cells and the order of the seats
        self._numbers = [config.max_wall_pieces, len(everybody), players * config.permute_ids]

        # All next games are dealt in advance, half of them anew at each step, in turn. A game
        # lasts 2 steps or more (unless final_time is 1), so that no deal is played twice.
        self._deals_per_step = math.ceil(num_envs / min(2, config.final_time))
        self._dealt = torch.tensor(0, device=self.device)  # whose next game is dealt anew first
        self.state, self.final_state, self._next = (self.initial_state() for _ in range(3))
        self.episode_return = torch.zeros(num_envs, players, device=self.device)
        self.final_return = torch.zeros_like(self.episode_return)
        self.reset(seed)
        if compile:
            self._advance = torch.compile(self._advance, dynamic=False)
            self.observe = torch.compile(self.observe, dynamic=False)

    def seats_to_ego(self, x):
        """[B, N, ...] by seat -> [B, N, N, ...]: entry (i, k) is seat (i + k) mod N"""
        return x[:, self.ego]

    def ego_to_seats(self, x):
        """[B, N, N, ...] in ego order -> entry (i, j) is what i holds about seat j"""
        return x[:, self.ego[:, :1], self.unego]

    def initial_state(self, num_games: int | None = None) -> State:
        """Deals `num_games` (default: num_envs) games"""
        return self._deal(self._uniform(num_games or self.num_envs))

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
        time = torch.zeros_like(position[:, 0])
        return State(
            position=position,
            present=torch.ones_like(position, dtype=torch.bool),
            prey_position=prey_position,
            prey_alive=torch.ones_like(prey_position, dtype=torch.bool),
            walls=walls.to(torch.uint8),
            time=time,
            first_hunt=time - 1,
        )

    def _lay_walls(self, uniform):  # [B, pieces] -> bool [B, H*W]
        config = self.config
        walls = uniform.new_zeros(len(uniform), config.num_cells, dtype=torch.bool)
        for k in range(config.max_wall_pieces):
            piece = self.pieces[(uniform[:, k] * len(self.pieces)).long()]
            free = ~(walls | piece)
            first_free = free & (free.cumsum(1) == 1)
            connected = (self._walk(first_free, ~free) < FAR) == free
            apart = ~(walls & piece).any(1)
            room = free.sum(1) >= config.num_prey + config.num_players
            fits = apart & room & connected.all(1)
            walls = torch.where(fits[:, None], ~free, walls)
        return walls

    def _walk(self, goal, walls):
        """bool [B, H*W] both -> int32 [B, H*W]: steps to the nearest goal, or FAR"""
        distance = torch.where(goal, 0, FAR).int()
        for _ in range(self.config.num_cells - 1):
            before = distance
            step = distance[:, self.target[:, :4]].amin(2) + 1
            distance = torch.minimum(distance, step).masked_fill(walls, FAR)
            if distance.device.type == "cpu" and distance.equal(before):  # a GPU would have to wait
                break
        return distance

    def legal_actions(self, state: State):
        """bool [B, N, 7]"""
        move = self.possible[state.position] & state.present[..., None]
        if self.config.max_wall_pieces:
            target = self.target[state.position]  # [B, N, 7]
            move &= state.walls.gather(1, target.flatten(1)).view(target.shape) == 0
        hunt = (self._on_prey(state) * self.hunt_action).sum(2)  # 0 where there is no prey
        return move | (self.action == STAY) | (self.action == hunt.clamp(min=STAY)[..., None])

    def _on_prey(self, state):  # [B, N, P]
        here = state.position[..., None] == state.prey_position[:, None]
        return here & state.prey_alive[:, None] & state.present[..., None]

    def transition(self, state: State, actions: Tensor):
        """actions int [B, N] -> next state (walls and prey_position are those of `state`), reward
        [B, N], present_before [B, N] (who acted), done [B]. A game that has ended stays as it is.
        On a GPU, where values are not read back, wrong actions act as stay."""
        integers = not (actions.is_floating_point() or actions.dtype == torch.bool)
        known = (actions >= 0) & (actions < NUM_ACTIONS)
        in_range = known.device.type != "cpu" or known.all()
        if actions.shape != state.position.shape or not (integers and in_range):
            raise ValueError(f"actions must be integers 0 to 6, {list(state.position.shape)}")
        ended = self.game_over(state)
        active = state.present & ~ended[:, None]
        actions = torch.where(active & known, actions, STAY).long()

        position = self.target[state.position, actions]
        if self.config.max_wall_pieces:
            free = state.walls.gather(1, position) == 0
            position = torch.where(free, position, state.position)

        hunting = self._on_prey(state) & (actions[..., None] == self.hunt_action)
        party = hunting.sum(1)  # [B, P]
        caught = party >= self.party_needed
        success = hunting & caught[:, None]
        share = self.prey_value / party.clamp(min=1)
        reward = (success * share[:, None]).sum(2)

        time = state.time + ~ended
        is_first = caught.any(1) & (state.first_hunt < 0)
        next_state = state._replace(
            position=position.to(torch.int32),
            present=state.present & ~success.any(2),
            prey_alive=state.prey_alive & ~caught,
            time=time,
            first_hunt=torch.where(is_first, time, state.first_hunt),
        )
        return next_state, reward, active, self.game_over(next_state)

    def game_over(self, state: State):
        """bool [B]"""
        over = ~state.present.any(1) | (state.time >= self.config.final_time)
        limit = self.config.steps_after_first_hunt
        if limit is not None:
            over |= (state.first_hunt >= 0) & (state.time - state.first_hunt >= limit)
        return over

    def observe(self, state: State):
        """uint8 [B, N, C, H, W]: each player's planes in its ego order"""
        return planes(self.config, self.cells(state), state.walls[:, None])

    def cells(self, state: State):
        """uint8 (int32 above 255) [B, N, N + P]: all cells in ego order, the prey's; H*W: gone"""
        gone = self.config.num_cells
        players = torch.where(state.present, state.position, gone)
        prey = torch.where(state.prey_alive, state.prey_position, gone)
        cells = torch.cat([players, prey], 1)[:, self.view_order]
        return cells.to(torch.uint8) if gone < 256 else cells

    def clock(self, state: State):
        return state.time / self.config.final_time

    def distance_to_prey(self, state: State, hunt_action: int):
        """int32 [B, H*W]: steps from each cell to the nearest such prey, or FAR"""
        stags = self.config.num_stags
        kind = slice(0, stags) if hunt_action == HUNT_STAG else slice(stags, None)
        prey = state.prey_position[:, kind]
        alive = state.prey_alive[:, kind, None]
        if prey.shape[1] == 0:
            return torch.full_like(state.walls, FAR, dtype=torch.int32)
        distance = torch.where(alive, self.manhattan[prey], FAR).amin(1)
        if self.config.max_wall_pieces:
            distance = self._walk(distance == 0, state.walls > 0)
        return distance

    def reset(self, seed: int | None = None):
        """Deals all games anew, from `seed` if one is given -> observation"""
        if seed is not None:
            if seed < 0:
                raise ValueError(f"a seed must be 0 or more, not {seed}")
            self.generator.manual_seed(seed)
        first, following = self.initial_state(), self.initial_state()
        kept = *self.state, *self.final_state, *self._next
        for x, dealt in zip(kept, (*first, *first, *following), strict=True):
            x.copy_(dealt)
        for counter in (self._dealt, self.episode_return, self.final_return):
            counter.zero_()
        return self.observe(self.state)

    def step(self, actions: Tensor):
        """-> observation (the new game's where one ended), reward, present_before, done"""
        reward, present_before, done = self.advance(actions)
        return self.observe(self.state), reward, present_before, done

    def advance(self, actions: Tensor, also_over=None):
        """As `step`, without the observation. `also_over`: state -> bool [B], who ends earlier"""
        return self._advance(actions, self._uniform(self._deals_per_step), also_over)

    def _advance(self, actions, uniform, also_over):
        reached, reward, present_before, done = self.transition(self.state, actions)
        if also_over is not None:
            done = done | also_over(reached)
        ended = done[:, None]
        total = self.episode_return + reward
        self.episode_return.copy_(total.masked_fill(ended, 0.0))
        torch.where(ended, total, self.final_return, out=self.final_return)
        dealt = self._deal(uniform)
        place = (self._dealt + torch.arange(self._deals_per_step, device=self.device)) % self.num_envs
        states = self.state, self.final_state, self._next, reached, dealt
        for name, now, last, upcoming, x, new in zip(State._fields, *states, strict=True):
            if name == "walls" and not self.config.max_wall_pieces:
                continue
            rows = done if x.dim() == 1 else ended
            torch.where(rows, x, last, out=last)
            torch.where(rows, upcoming, x, out=now)  # of prey and walls, x is now
            if name in ("position", "prey_position", "walls"):  # the others always begin the same
                upcoming[place] = new
        self._dealt.copy_((self._dealt + self._deals_per_step) % self.num_envs)
        return reward, present_before, done

    @property
    def final_prey(self):
        """int64 [B, N]: HUNT_STAG, HUNT_HARE or 0"""
        state = self.final_state  # who has caught prey left from its cell
        same_cell = state.position[..., None] == state.prey_position[:, None]
        left_from = same_cell & ~state.present[..., None]
        return (left_from * self.hunt_action).sum(2)

    def state_dict(self):
        """All that `step` changes, the tensors themselves"""
        names = "episode_return", "final_return", "_dealt"
        saved = {name: getattr(self, name) for name in names}
        for name in ("state", "final_state", "_next"):
            saved[name] = getattr(self, name)._asdict()
        return saved | {"generator": self.generator.get_state()}


def planes(config, cells, walls):
    """cells [..., N + P] as of StagHuntEnv.cells, walls [..., H*W or 1] -> uint8 [..., C, H, W]"""
    size, players = config.num_cells, config.num_players
    table = torch.eye(size + 1, size, dtype=torch.uint8, device=cells.device)
    one_hot = F.embedding(cells.int(), table).unbind(-2)  # N + P times [..., H*W]
    stags = one_hot[players : players + config.num_stags]
    hares = one_hot[players + config.num_stags :]
    nothing = torch.zeros_like(one_hot[0])
    shared = nothing + (walls > 0), sum(stags, nothing), sum(hares, nothing)
    board = torch.stack([*one_hot[:players], *shared], -2)
    return board.unflatten(-1, (config.height, config.width))


def _distinct(uniform, end):
    """[B, K] in [0, 1) -> [B, K] distinct numbers below `end` (an int or [B, 1])"""
    places = uniform.shape[1]
    not_taken = end - torch.arange(places, device=uniform.device)
    number = (uniform * not_taken).to(torch.int32)  # among those not yet taken
    for k in reversed(range(places - 1)):
        later = number[:, k + 1 :]
        later += later >= number[:, k : k + 1]
    return number


def wall_pieces(height, width):
    """bool [pieces, H*W]: all straight and L-shaped pieces of 3 or 4 cells"""
    board = set(itertools.product(range(height), range(width)))
    arms = (2, 0), (3, 0), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)  # up or down, and beside
    turns = (1, 1), (1, -1), (-1, 1), (-1, -1)
    pieces = set()
    for (row, column), (tall, wide), (down, right) in itertools.product(board, arms, turns):
        piece = {(row + down * k, column) for k in range(tall + 1)}
        piece |= {(row, column + right * k) for k in range(wide + 1)}
        if piece <= board:
            pieces.add(tuple(sorted(row * width + column for row, column in piece)))
    return np.array([np.isin(np.arange(height * width), piece) for piece in sorted(pieces)])


# Rule-based players: (env, state, legal actions [B, N, 7]) -> what such a player would do in each
# seat [B, N, 7]. To add one, add a function to PLAYER_PROBS.


def random_probs(env, state, legal):
    return legal / legal.sum(-1, keepdim=True)


def hunter_probs(env, state, legal, prey):
    """To the nearest such prey, uniform over all shortest paths; without such prey as `random`"""
    distance = env.distance_to_prey(state, prey)
    target = env.target[state.position]
    now = distance.gather(1, state.position.long())[..., None]
    after = distance.gather(1, target.flatten(1)).view(target.shape)
    wanted = legal & ((after < now) | ((now == 0) & (env.action == prey)))
    wanted = torch.where(wanted.any(-1, keepdim=True), wanted, legal)
    return wanted / wanted.sum(-1, keepdim=True)


def one_stag_probs(env, state, legal, sign):
    """Hunts the living stag of the lowest (sign 1) or highest (-1) cell number"""
    cell = sign * state.prey_position
    is_stag = state.prey_alive & (env.hunt_action == HUNT_STAG)
    lower = is_stag[:, None] & (cell[:, None] < cell[..., None])  # [B, P, P]
    alive = state.prey_alive & ~(is_stag & lower.any(2))
    return hunter_probs(env, state._replace(prey_alive=alive), legal, HUNT_STAG)


PLAYER_PROBS = {
    "random": random_probs,
    "nearest_stag": partial(hunter_probs, prey=HUNT_STAG),
    "nearest_hare": partial(hunter_probs, prey=HUNT_HARE),
    "first_stag": partial(one_stag_probs, sign=1),
    "last_stag": partial(one_stag_probs, sign=-1),
}
POPULATION = ("random", "nearest_stag", "nearest_hare")
LEARNER, MIXED = -1, -2  # what a seat may hold besides the number of a player


def sample(probs, generator=None):
    """[..., A] -> int64 [...], never one of probability 0: the first event at these rates"""
    noise = torch.empty_like(probs).exponential_(generator=generator)
    noise.clamp_(min=torch.finfo(noise.dtype).tiny)  # argmax takes 0 / 0 for the largest
    return (probs / noise).argmax(-1)


def player_names(names, others=()):
    """ "a,b" or ["a", "b"] -> ["a", "b"], all rule-based players or `others`"""
    names = names.split(",") if isinstance(names, str) else list(names)
    known = *others, *PLAYER_PROBS
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown players {unknown}; the known ones are {', '.join(known)}")
    return names


def seats_table(seats, num_players, others=("learner", "mixed")):
    """Who sits where as a list of names; None: learners everywhere"""
    names = player_names(["learner"] * num_players if seats is None else seats, others)
    if len(names) != num_players:
        raise ValueError(f"{len(names)} seats for {num_players} players: {','.join(names)}")
    return names


def redraw_prob(redraw):
    """How likely a game's end brings a new player: "game" is 1, "never" 0, or the number itself"""
    prob = float({"game": 1, "never": 0}.get(redraw, redraw))
    if not 0 <= prob <= 1:
        raise ValueError(f"redraw must be game, never or a probability, not {redraw}")
    return prob


class Seats:
    """Who sits where in S blocks of E games (B = S*E = env.num_envs). In each step call
    `action_probs`, then `update`.

    `tables`: the N names of each block: learner, mixed or a rule-based player. The M learners are
    numbered block by block, seat by seat; `share_parameters` makes those of a block, as many in
    each, one learner. A mixed seat holds one of the `population`. `redraw`: another after each
    "game", "never", or with this probability; after each in a share `unsteady` of a block's games.
    `watch`: learners only watch, all seats are mixed. `teams`: see `_make_teams`.

    `kinds` int64 [B, N]: LEARNER, or a number in `names`, whose first P are the population. `table`
    [B, N, names, 7]: what each would do, as of the last `action_probs`."""

    def __init__(
        self, env, tables, share_parameters=False, population=POPULATION, redraw=1, watch=False, teams=False, unsteady=0
    ):
        tables = [seats_table(table, env.config.num_players) for table in tables]
        self.env = env
        self.num_blocks = len(tables)
        self.num_envs = env.num_envs // len(tables)
        self.population = player_names(population)
        if len({*self.population}) < len(self.population):
            raise ValueError(f"a player twice in the population {self.population}")
        self.share_parameters = share_parameters
        self.watch = watch
        device = env.device
        named = {*itertools.chain(*tables)} - {*self.population}
        others = [name for name in PLAYER_PROBS if name in named and not watch]
        self.names = self.population + others
        number_of = {name: number for number, name in enumerate(self.names)}
        number_of |= {"learner": LEARNER, "mixed": MIXED}
        seated = [[number_of.get(name, MIXED) for name in table] for table in tables]
        seated = torch.tensor(seated, device=device)  # [S, N]

        learns = seated == LEARNER
        self.num_learners = self.num_blocks if share_parameters else int(learns.sum())
        self.has_rule_based = watch or not learns.all().item()
        self._block, self._seat = learns.nonzero(as_tuple=True)
        self.learner_seat = self._share(self._seat[:, None].expand(-1, self.num_envs))  # [M, E]

        seated = torch.full_like(seated, MIXED) if watch else seated
        kinds = seated.repeat_interleave(self.num_envs, 0)  # [B, N]
        mixed = kinds == MIXED
        games, players = kinds.shape
        place = torch.arange(games, device=device)[:, None] % self.num_envs  # [B, 1] in its block
        self._team = (place % 2 == 1) & teams
        self._onlooker = place // 2 % players == torch.arange(players, device=device)
        # Dealt evenly: with players that stay, luck would else outweigh what is measured.
        count = len(self.population)
        shape = self.num_blocks, self.num_envs, players
        order = torch.rand(shape, device=device).argsort(1)
        first = torch.randint(count, (self.num_blocks, 1, players), device=device)
        drawn = (order + first).flatten(0, 1)  # [B, N]
        drawn = torch.where(self._team, place // 2 // players, drawn) % count
        self.kinds = torch.where(mixed, self._make_teams(drawn), kinds)
        changes = mixed & (place < round(unsteady * self.num_envs))
        self.steady_prob = mixed * redraw_prob(redraw)  # [B, N] of a new player after a game
        self.redraw_prob = torch.where(changes, 1.0, self.steady_prob)

    def _make_teams(self, drawn):
        """Every second game is a team, where all are like the first: else three hare hunters would
        be rare. But one is random, if the population has that: it sees what the others leave."""
        team = drawn[:, :1].expand_as(drawn)
        if "random" in self.population:
            team = torch.where(self._onlooker, self.population.index("random"), team)
        return torch.where(self._team, team, drawn)

    def to_learners(self, x):
        """[B, N, ...] by seat -> [M, E, ...], a copy"""
        x = x.unflatten(0, (self.num_blocks, self.num_envs))  # [S, E, N, ...]
        return self._share(x.movedim(2, 1)[self._block, self._seat])

    def per_learner(self, x):
        """[B, ...], the same for all seats -> [M, E, ...], a copy"""
        x = x.unflatten(0, (self.num_blocks, self.num_envs))
        return self._share(x[self._block])

    def _share(self, x):
        shape = self.num_blocks, -1
        return x.unflatten(0, shape).flatten(1, 2) if self.share_parameters else x

    def to_seats(self, x, others=None):
        """[M, E, ...] -> [B, N, ...], `others` [B, N, ...] where no learner sits"""
        x = x.reshape(len(self._seat), self.num_envs, *x.shape[2:])
        if others is None:  # learners everywhere
            return x.unflatten(0, (self.num_blocks, -1)).movedim(1, 2).flatten(0, 1)
        seats = others.clone()
        by_block = seats.unflatten(0, (self.num_blocks, self.num_envs)).movedim(2, 1)
        by_block[self._block, self._seat] = x
        return seats

    def action_probs(self, state, learner_probs=None):
        """[B, N, 7] of everybody; learner_probs [M, E, 7] unless the learners only watch"""
        if (self.num_learners > 0 and not self.watch) == (learner_probs is None):
            raise ValueError("learner_probs are for learners that do not only watch")
        probs = None
        if self.has_rule_based:
            legal = self.env.legal_actions(state)
            rules = [PLAYER_PROBS[name](self.env, state, legal) for name in self.names]
            self.table = torch.stack(rules, 2)
            kind = self.kinds.clamp(min=0)[..., None, None]
            probs = self.table.gather(2, kind.expand(-1, -1, 1, NUM_ACTIONS)).squeeze(2)
        return probs if learner_probs is None else self.to_seats(learner_probs, probs)

    def update(self, done):
        """New players, only where a game ended"""
        if self.has_rule_based:
            uniform = torch.rand(self.kinds.shape, device=done.device)
            redrawn = done[:, None] & (uniform < self.redraw_prob)
            drawn = self._make_teams(torch.randint_like(self.kinds, len(self.population)))
            self.kinds.copy_(torch.where(redrawn, drawn, self.kinds))


# Pictures

COLOURS = ("#d64541", "#3478c8", "#f0b429", "#8255b4", "#1ea096", "#eb7832", "#dc5a96", "#5a5a64")
GRASS = ("#bad58e", "#b0cd82")
WALL = "#a5a09b"
INK = {"b": "#6e4623", "B": "#a56e3c", "k": "#281e19", "w": "#f5f0e6", "g": "#a5a09b", "p": "#e19696"}
STAG = """
    .b.b....b.b. .bbb....bbb. ..bb....bb.. ...bb..bb... .BB.BBBB.BB. ..BBBBBBBB..
    ...BkBBkB... ...BBBBBB... ....BBBB.... ....BBBB.... ....BkkB.... .....BB....."""
HARE = """
    ...gg..gg... ..ggpggpgg.. ..gpggggpg.. ..gpg..gpg.. ...gg..gg... ..wwwwwwww..
    .wwkwwwwkww. .wwwwwwwwww. .wwwwppwwww. ..wwwkkwww.. ...wwwwww... ............"""
CELL = 108  # pixels
LINE = 40  # pixels of a line of text
RIM = ((-1, -1), (1, 1), (1, -1), (-1, 1), (-1, 0), (1, 0), (0, 1), (0, -1))  # players in company
FONT = cache(ImageFont.load_default)


def render_ansi(env, state, returns):
    """The first game as text: digits are players, S a stag, h a hare, # a wall"""
    players = env.config.num_players
    marks = [*map(str, range(players)), "#", "S", "h"]
    lines = []
    for row in env.observe(state)[0, 0].cpu().numpy().transpose(1, 2, 0):
        cells = ["".join(itertools.compress(marks, seen)).center(players + 1) for seen in row]
        lines.append(f"|{'|'.join(cells)}|")
    scores = [f"  {i}: {score:.4g}" for i, score in enumerate(returns[0].tolist())]
    lines.append(f"t={int(state.time[0])}/{env.config.final_time} {''.join(scores)}")
    return "\n".join(lines)


def render_rgb(env, state, returns, names=("",) * 8, hunting=None):
    """The first game as a picture: the board, the clock, each player's name and return. `hunting`
    [N], actions: who hunts gets a ring."""
    config = env.config
    planes = env.observe(state)[0, 0].cpu().numpy()
    width, height = config.width * CELL, config.height * CELL
    size = max(width, 320), height + LINE * (config.num_players + 1)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for row, column in np.ndindex(config.height, config.width):
        ground = WALL if planes[config.num_players, row, column] else GRASS[(row + column) % 2]
        left, top = column * CELL, row * CELL
        draw.rectangle((left, top, left + CELL - 1, top + CELL - 1), ground)
    for plane, row, column in np.argwhere(planes)[::-1].tolist():  # players on top
        kind = plane - config.num_players
        x, y = column * CELL + CELL // 2, row * CELL + CELL // 2
        half = CELL // 3
        if kind < 0:
            if planes[:, row, column].sum() > 1:
                half = CELL // 6
                x += 2 * half * RIM[plane][0]
                y += 2 * half * RIM[plane][1]
            ring = "black" if hunting is not None and hunting[plane] > STAY else None
            draw.circle((x, y), half, COLOURS[plane], outline=ring, width=4)
            draw.text((x, y), str(plane), "white", FONT(half), "mm", stroke_width=2, stroke_fill="black")
        elif kind > 0:
            sprite = (STAG if kind == 1 else HARE).split()
            for down, right in np.ndindex(12, 12):
                if sprite[down][right] in INK:
                    left, top = x - half + 6 * right, y - half + 6 * down
                    draw.rectangle((left, top, left + 5, top + 5), INK[sprite[down][right]])
    lines = [f"t {int(state.time[0])}/{config.final_time}"]
    lines += [f"{i} {names[i]}  {score:.4g}" for i, score in enumerate(returns[0].tolist())]
    for row, (text, colour) in enumerate(zip(lines, ("black", *COLOURS), strict=False)):
        place = 10, height + LINE * row + LINE // 2
        draw.text(place, text, colour, FONT(24), "lm", stroke_width=0.5)
    return np.array(image)


def write_gif(path, frames, fps=4):
    first, *others = [Image.fromarray(frame) for frame in frames]
    pauses = [round(1000 / fps)] * len(others) + [1500]  # milliseconds
    first.save(path, save_all=True, append_images=others, duration=pauses, loop=0)


# Wrappers: numpy in and out

RENDERERS = {"ansi": render_ansi, "rgb_array": render_rgb}
GYM_SEATS = "learner,nearest_stag,nearest_hare,random"


def _joint_actions(core, state, sits, chosen):
    """int64 [B, N]: `chosen` [B, learners], the others' at random. sits: name -> seats"""
    legal = core.legal_actions(state)
    probs = torch.zeros(legal.shape)
    for name, seats in sits.items():
        if name != "learner":
            probs[:, seats] = PLAYER_PROBS[name](core, state, legal)[:, seats]
    joint = sample(probs, core.generator)
    joint[:, sits["learner"]] = chosen
    return joint


def _observations(core, state, seats):
    """What is seen from `seats`: name -> [B, seats, ...]"""
    legal = core.legal_actions(state)[:, seats]
    board = planes(core.config, core.cells(state)[:, seats], state.walls[:, None])
    clock = core.clock(state)[:, None, None].repeat(1, len(seats), 1)
    return {
        "observation": board.numpy().view(np.int8),
        "action_mask": legal.numpy().astype(np.int8),
        "time": clock.numpy(),
    }


class StagHuntParallelEnv(ParallelEnv):
    """PettingZoo wrapper. Agents are the learners among `seats` (default: all). The game is set by
    `config` and its fields: StagHuntParallelEnv(height=5). Who has left stays an agent, with one
    legal action. A game terminates, never truncates; also once all agents have left."""

    metadata: ClassVar = {"name": "stag_hunt_v0", "render_modes": list(RENDERERS), "render_fps": 4}

    def __init__(self, config=None, render_mode=None, seats=None, **fields):
        self.config = config = dataclasses.replace(config or StagHuntConfig(), **fields)
        names = seats_table(seats, config.num_players, ("learner",))
        self.sits = {name: [i for i, x in enumerate(names) if x == name] for name in names}
        self.render_mode = render_mode
        self.core = StagHuntEnv(config)
        self.core.generator.seed()  # games differ until reset(seed=...)
        self.seat = {f"player_{i}": i for i in self.sits["learner"]}
        self.possible_agents = list(self.seat)
        self.agents = []
        observation_space = Dict(
            observation=MultiBinary(config.observation_shape),  # SB3 takes a Box for an image
            action_mask=MultiBinary(NUM_ACTIONS),
            time=Box(0, 1, (1,), np.float32),
        )
        action_space = Discrete(NUM_ACTIONS)
        self.observation_space = lambda agent: observation_space
        self.action_space = lambda agent: action_space

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.core.generator.manual_seed(int(np.uint64(seed)))  # refuses negative seeds
        self.game = self.core.initial_state()  # State, B = 1
        self.returns = torch.zeros(1, self.config.num_players)
        self.agents = list(self.seat)
        return self._observe()

    def step(self, actions):
        if not self.agents:
            raise ValueError("no game is on: call reset first")
        for agent, action in actions.items():
            if type(action) is bool or not self.action_space(agent).contains(action):
                raise ValueError(f"{agent}'s action must be an integer, 0 to 6, not {action!r}")
        chosen = torch.tensor([int(actions[agent]) for agent in self.seat])
        joint = _joint_actions(self.core, self.game, self.sits, chosen)
        self.game, reward, _, done = self.core.transition(self.game, joint)
        self.returns += reward
        over = bool(done) or not self.game.present[0, self.sits["learner"]].any()
        self.agents = [] if over else self.agents
        observations, infos = self._observe()
        rewards = {agent: float(reward[0, i]) for agent, i in self.seat.items()}
        ends = dict.fromkeys(self.seat, over)
        return observations, rewards, ends, dict.fromkeys(self.seat, False), infos

    def _observe(self):  # observations, infos
        seen = _observations(self.core, self.game, self.sits["learner"])
        observations = {}
        for k, agent in enumerate(self.seat):
            observations[agent] = {name: x[0, k] for name, x in seen.items()}
        infos = {agent: {"action_mask": x["action_mask"]} for agent, x in observations.items()}
        return observations, infos

    def render(self):
        if self.render_mode is not None:
            return RENDERERS[self.render_mode](self.core, self.game, self.returns)


class StagHuntGymEnv(gymnasium.Env):
    """Gymnasium wrapper: one learner among rule-based players. The episode ends when it has left.
    gymnasium.make("stag_hunt_env:StagHunt-v0", height=5)"""

    metadata = StagHuntParallelEnv.metadata

    def __init__(self, config=None, seats=GYM_SEATS, render_mode=None, **fields):
        self.parallel_env = env = StagHuntParallelEnv(config, render_mode, seats, **fields)
        (self.agent,) = env.seat  # one learner
        self.render_mode = render_mode
        self.render = env.render
        self.observation_space = env.observation_space(self.agent)
        self.action_space = env.action_space(self.agent)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        observations, infos = self.parallel_env.reset(seed)
        return observations[self.agent], infos[self.agent]

    def step(self, action):
        outcome = self.parallel_env.step({self.agent: action})
        return tuple(by_agent[self.agent] for by_agent in outcome)

    def action_masks(self):
        """bool [7]: the name by which MaskablePPO of sb3-contrib asks"""
        env = self.parallel_env
        return env.core.legal_actions(env.game)[0, env.seat[self.agent]].numpy()


class StagHuntVectorEnv(VectorEnv):
    """The same, `num_envs` games at once: gymnasium.make_vec. A game that ends is replaced in the
    same step; infos have its `final_obs` and `final_info`. A seed deals other games than above."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs=1, config=None, seats=GYM_SEATS, **fields):
        one = StagHuntGymEnv(config, seats, **fields)
        self.num_envs = num_envs
        self.sits = one.parallel_env.sits
        (self.seat,) = self.sits["learner"]
        self.core = StagHuntEnv(one.parallel_env.config, num_envs)
        self.core.generator.seed()
        self.single_observation_space = one.observation_space
        self.single_action_space = one.action_space
        self.observation_space = batch_space(one.observation_space, num_envs)
        self.action_space = batch_space(one.action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.core.reset(seed)
        return self._observe(self.core.state)

    def step(self, actions):
        actions = np.asarray(actions)
        if actions.dtype.kind not in "iu" or not self.action_space.contains(actions):
            raise ValueError(f"actions must be {self.num_envs} integers, 0 to 6, not {actions}")
        chosen = torch.tensor(actions)[:, None]
        joint = _joint_actions(self.core, self.core.state, self.sits, chosen)
        reward, _, done = self.core.advance(joint, lambda state: ~state.present[:, self.seat])
        over = done.numpy()
        observation, infos = self._observe(self.core.state)
        if over.any():  # as gymnasium's SyncVectorEnv
            final, final_info = self._observe(self.core.final_state)
            final_obs = np.full(self.num_envs, None)
            for game in np.flatnonzero(over):
                final_obs[game] = {name: x[game] for name, x in final.items()}
            infos |= {"final_obs": final_obs, "_final_obs": over}
            infos |= {"final_info": final_info, "_final_info": over}
        return observation, reward[:, self.seat].double().numpy(), over, np.zeros_like(over), infos

    def _observe(self, state):  # observation, infos
        seen = _observations(self.core, state, [self.seat])
        seen = {name: x[:, 0] for name, x in seen.items()}
        mask = seen["action_mask"]
        return seen, {"action_mask": mask, "_action_mask": np.ones(self.num_envs, bool)}


gymnasium.register("StagHunt-v0", f"{__name__}:StagHuntGymEnv", vector_entry_point=f"{__name__}:StagHuntVectorEnv")


def watch(config: StagHuntConfig, seats: str = "", gif: str = "", seed: int = 1):
    """Shows a game. `seats`: who sits where, such as mixed,random; `gif`: where to write it"""
    torch.manual_seed(seed)
    env = StagHuntEnv(config, seed=seed)
    players = Seats(env, [seats or ["mixed"] * config.num_players])
    names = [players.names[kind] for kind in players.kinds[0].tolist()]
    print(*(f"{i} {name} " for i, name in enumerate(names)), " (S stag, h hare, # wall)")
    frames = []
    done = False
    while not done:
        print(render_ansi(env, env.state, env.episode_return), flush=True)
        actions = sample(players.action_probs(env.state))
        frames.append(render_rgb(env, env.state, env.episode_return, names, actions[0]))
        _, _, done = env.advance(actions)
    print(render_ansi(env, env.final_state, env.final_return))
    frames.append(render_rgb(env, env.final_state, env.final_return, names))
    if gif:
        write_gif(gif, frames)


if __name__ == "__main__":
    tyro.cli(watch, config=(tyro.conf.OmitArgPrefixes,))
