"""Reset deals walls, prey and players as the rules say, and the two maps between seats and ego order are inverse."""

from itertools import permutations

from stag_hunt_env import StagHuntConfig, StagHuntEnv

import pytest
import reference_game as reference
import torch
from helpers import chi_square_p, games_of

SHAPES = [  # (row, column) cells of every piece, before turning and mirroring
    [(0, 0), (0, 1), (0, 2)],
    [(0, 0), (0, 1), (0, 2), (0, 3)],
    [(0, 0), (1, 0), (1, 1)],
    [(0, 0), (1, 0), (2, 0), (2, 1)],
]


def placements(height, width):
    """Every piece laid on the board, as a set of cells"""
    turned = [[(a * r, b * c) for r, c in shape] for shape in SHAPES for a in (1, -1) for b in (1, -1)]
    turned += [[(c, r) for r, c in shape] for shape in turned]
    for shape in turned:
        for top in range(-4, height + 4):
            for left in range(-4, width + 4):
                cells = [(top + r, left + c) for r, c in shape]
                if all(0 <= r < height and 0 <= c < width for r, c in cells):
                    yield frozenset(r * width + c for r, c in cells)


def fewest_pieces(walls, pieces):
    """The least number of pieces that make up `walls` without overlap, or 99 if none do"""
    if not walls:
        return 0
    fitting = [piece for piece in pieces if min(walls) in piece and piece <= walls]
    return min((1 + fewest_pieces(walls - piece, pieces) for piece in fitting), default=99)


@pytest.mark.parametrize(
    "height, width, max_pieces, players", [(6, 7, 3, 4), (3, 5, 4, 2), (4, 4, 1, 4), (1, 12, 2, 2), (3, 3, 1, 3)]
)
def test_walls_are_pieces_and_leave_the_board_connected(height, width, max_pieces, players):
    config = StagHuntConfig(height=height, width=width, num_players=players, num_hares=2, max_wall_pieces=max_pieces)
    pieces, used = set(placements(height, width)), []
    for game in games_of(StagHuntEnv(config, 150, seed=1).initial_state()):
        occupied = game.position + game.prey
        assert len(set(occupied)) == len(occupied) and not game.walls & set(occupied)
        free = set(range(config.num_cells)) - game.walls
        assert set(reference.distances(config, game, game.position[:1])) == free, "walls cut the board in two"
        used.append(fewest_pieces(frozenset(game.walls), pieces))
    assert max(used) <= max_pieces, "walls that are not made of the pieces, or too many of them"
    assert max(used) >= 1 and (max(used) >= 2 or max_pieces == 1 or height == 1)


def test_every_wall_piece_is_laid_as_often_as_any_other():
    config = StagHuntConfig(height=4, width=5, num_players=2, num_stags=0, num_hares=0, max_wall_pieces=1)
    walls = StagHuntEnv(config, 1, seed=2).initial_state(20_000).walls
    laid = {}
    for row in walls.tolist():
        cells = frozenset(cell for cell, wall in enumerate(row) if wall)
        laid[cells] = laid.get(cells, 0) + 1
    empty = laid.pop(frozenset(), 0)
    connected = set(placements(4, 5)) - _cutting(config)
    assert set(laid) == connected
    assert chi_square_p(list(laid.values())) > 1e-3
    assert (empty > 0) == bool(_cutting(config))


def _cutting(config):
    """Pieces that alone cut the board in two"""
    cut = set()
    for piece in set(placements(config.height, config.width)):
        game = reference.Game([], [], [], [], set(piece))
        free = set(range(config.num_cells)) - piece
        if set(reference.distances(config, game, [min(free)])) != free:
            cut.add(piece)
    return cut


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("height, width, walls", [(3, 5, 0), (4, 4, 0), (3, 5, 1)])
def test_start_cells_are_uniform(height, width, walls, permute):
    """Among the free ones, however many these are; and so is each pair of them"""
    fields = {"num_players": 3, "num_hares": 1, "max_wall_pieces": walls, "permute_ids": permute}
    state = StagHuntEnv(StagHuntConfig(height, width, **fields), seed=3).initial_state(30_000)
    free = 1 - state.walls.long()
    cells = torch.cat([state.position, state.prey_position], 1).long()
    ranks = (free.cumsum(1) - 1).gather(1, cells)
    for room in free.sum(1).unique().tolist():
        dealt = ranks[free.sum(1) == room]
        for i in range(5):
            assert chi_square_p(torch.bincount(dealt[:, i], minlength=room)) > 1e-4
            for j in range(i):
                pairs = torch.bincount(dealt[:, i] * room + dealt[:, j], minlength=room**2).view(room, room)
                assert (pairs.diagonal() == 0).all()
                assert chi_square_p(pairs[~torch.eye(room, dtype=torch.bool)]) > 1e-4


def test_permute_ids_deals_the_same_places_to_other_seats(monkeypatch):
    fields = {"height": 3, "width": 4, "num_players": 3, "num_hares": 2}
    plain, permuted = (StagHuntEnv(StagHuntConfig(**fields, permute_ids=permute)) for permute in (False, True))
    table = torch.rand(600, 20, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch, "rand", lambda games, numbers, **_: table[:games, :numbers])  # the same for both
    counts = dict.fromkeys(permutations(range(3)), 0)
    for before, after in zip(*(games_of(env.initial_state(600)) for env in (plain, permuted)), strict=True):
        assert before.prey == after.prey
        assert sorted(before.position) == sorted(after.position)
        counts[tuple(before.position.index(cell) for cell in after.position)] += 1
    assert chi_square_p(list(counts.values())) > 1e-3


@pytest.mark.parametrize("n", range(2, 9))
def test_ego_order_and_back(n):
    env = StagHuntEnv(StagHuntConfig(height=4, width=5, num_players=n), 2)
    seats = torch.arange(n).expand(2, n) + torch.tensor([[0], [100]])
    ego = env.seats_to_ego(seats)
    assert ego.tolist() == [[[(i + k) % n + b for k in range(n)] for i in range(n)] for b in (0, 100)]
    assert torch.equal(env.ego_to_seats(ego), seats[:, None].expand(2, n, n))
    deep = torch.arange(2 * n * 3 * 2).view(2, n, 3, 2)
    assert torch.equal(env.ego_to_seats(env.seats_to_ego(deep)), deep[:, None].expand(2, n, n, 3, 2))
    beliefs = torch.arange(2 * n * n * 3).view(2, n, n, 3)  # observers need not agree
    back = env.ego_to_seats(beliefs)
    assert all(torch.equal(back[:, i, (i + k) % n], beliefs[:, i, k]) for i in range(n) for k in range(n))
