"""The rules of the game once more, one game at a time in plain Python: what the batched game is compared with.

Written from the rules, not from stag_hunt_env.py. A game is a `Game` of ints, lists and sets.
"""

import dataclasses
from functools import cache

import numpy as np

UP, DOWN, LEFT, RIGHT, STAY, HUNT_STAG, HUNT_HARE = range(7)


@dataclasses.dataclass
class Game:
    position: list[int]
    present: list[bool]
    prey: list[int]  # cells, stags first
    alive: list[bool]
    walls: set[int]
    time: int = 0
    first_hunt: int = -1


@cache
def neighbours(height, width, cell):
    """{move: cell it leads to}, moves off the board left out"""
    row, column = divmod(cell, width)
    places = {UP: (row - 1, column), DOWN: (row + 1, column), LEFT: (row, column - 1), RIGHT: (row, column + 1)}
    return {move: r * width + c for move, (r, c) in places.items() if 0 <= r < height and 0 <= c < width}


def moves(config, game, cell):
    return {move: to for move, to in neighbours(config.height, config.width, cell).items() if to not in game.walls}


def hunted_by(config, prey):
    return HUNT_STAG if prey < config.num_stags else HUNT_HARE


def legal_actions(config, game, seat):
    if not game.present[seat]:
        return {STAY}
    legal = {STAY, *moves(config, game, game.position[seat])}
    for prey, cell in enumerate(game.prey):
        if game.alive[prey] and cell == game.position[seat]:
            legal.add(hunted_by(config, prey))
    return legal


def game_over(config, game):
    k = config.steps_after_first_hunt
    if k is not None and game.first_hunt >= 0 and game.time - game.first_hunt >= k:
        return True
    return game.time >= config.final_time or not any(game.present)


def parties(config, game, actions):
    """{prey: the seats that hunt it now}"""
    found = {}
    for seat, action in enumerate(actions):
        if action in (HUNT_STAG, HUNT_HARE) and action in legal_actions(config, game, seat):
            prey = next(p for p, cell in enumerate(game.prey) if game.alive[p] and cell == game.position[seat])
            found.setdefault(prey, []).append(seat)
    return found


def step(config, game, actions):
    """Plays one step in `game` itself -> rewards (np.float32), who acted, is the game over"""
    seats = range(config.num_players)
    if game_over(config, game):
        return [np.float32(0)] * len(seats), [False] * len(seats), True
    acted = list(game.present)
    hunting = parties(config, game, actions)
    for seat in seats:
        if game.present[seat]:
            options = moves(config, game, game.position[seat])
            game.position[seat] = options.get(actions[seat], game.position[seat])

    game.time += 1
    rewards = [np.float32(0)] * len(seats)
    for prey, party in hunting.items():
        is_stag = prey < config.num_stags
        if is_stag and len(party) < 2:
            continue
        value = config.stag_reward if is_stag else config.hare_reward
        for seat in party:
            rewards[seat] = np.float32(value) / np.float32(len(party))
            game.present[seat] = False
        game.alive[prey] = False
        if game.first_hunt < 0:
            game.first_hunt = game.time
    return rewards, acted, game_over(config, game)


def observe(config, game):
    """One bytes object: for each player, for each plane, one byte a cell, row by row."""

    def plane(cells):
        board = bytearray(config.height * config.width)
        for cell in cells:
            board[cell] = 1
        return bytes(board)

    n = config.num_players
    players = [plane([game.position[seat]] if game.present[seat] else []) for seat in range(n)]
    living = [(prey, cell) for prey, cell in enumerate(game.prey) if game.alive[prey]]
    rest = [
        plane(game.walls),
        plane(cell for prey, cell in living if prey < config.num_stags),
        plane(cell for prey, cell in living if prey >= config.num_stags),
    ]
    return b"".join(b"".join([players[(i + k) % n] for k in range(n)] + rest) for i in range(n))


def distances(config, game, sources):
    """{cell: steps to the nearest of `sources`}, by breadth-first search around walls"""
    found, edge = dict.fromkeys(sources, 0), list(sources)
    while edge:
        cell = edge.pop(0)
        for to in moves(config, game, cell).values():
            if to not in found:
                found[to] = found[cell] + 1
                edge.append(to)
    return found


def player_probs(config, game, seat, name):
    """[7] probabilities of the rule-based player `name`"""
    choices = legal_actions(config, game, seat)
    hunt = None if name == "random" else HUNT_HARE if name == "nearest_hare" else HUNT_STAG
    targets = [cell for p, cell in enumerate(game.prey) if game.alive[p] and hunted_by(config, p) == hunt]
    if name in ("first_stag", "last_stag") and targets:
        targets = [min(targets) if name == "first_stag" else max(targets)]
    if targets and game.present[seat]:
        here, distance = game.position[seat], distances(config, game, targets)
        closer = {move for move, to in moves(config, game, here).items() if distance[to] < distance[here]}
        choices = {hunt} if distance[here] == 0 else closer
    return [(action in choices) / len(choices) for action in range(7)]
