"""The board encoder: sums of table rows, and their gradient"""

import dataclasses

import hopplus_ppo
from stag_hunt_env import StagHuntConfig, StagHuntEnv

import pytest
import torch

CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_stags=2, num_hares=2, final_time=9)


def product(table, index):
    """[M, rows, width], [M, n, k] -> a row counts as often as it is named"""
    named = torch.zeros(*index.shape[:2], table.shape[1])
    named.scatter_add_(2, index, torch.ones(index.shape))
    return named @ table


class OnGPU(torch.Tensor):
    is_cuda = True


def boards(config=CONFIG, games=64):
    """[1, n, X] of games under way; in each third the second and third player are gone"""
    env = StagHuntEnv(config, games, seed=1)
    cells = env.cells(env.state).flatten(0, 1)[None]
    cells[:, ::3, 1:3] = config.num_cells
    walls = torch.zeros(1, cells.shape[1], config.num_wall_cells, dtype=torch.uint8)
    return torch.cat([cells, walls], 2).float()


@pytest.mark.parametrize("parts", [1, 2])
def test_the_product_of_a_gpu_is_the_lookup_of_a_cpu(parts):
    """What they find, and their gradients; computed here"""
    torch.manual_seed(0)
    encoder = hopplus_ppo.BoardEncoder(CONFIG, 8)
    encoder.table.data = torch.randn(3, *encoder.table.shape[1:])  # of three learners
    board = boards().unflatten(1, (3 * parts, -1)).flatten(0, 1)
    weight = torch.randn(*board.shape[:2], 8)
    found = []
    for each in (board, board.as_subclass(OnGPU)):
        output = encoder(each).as_subclass(torch.Tensor)
        (gradient,) = torch.autograd.grad((output * weight).sum(), encoder.table)
        found.append((output, gradient.as_subclass(torch.Tensor)))
    (looked_up, gradient), (product_output, product_gradient) = found
    assert torch.allclose(looked_up, product_output, atol=1e-5)
    assert torch.allclose(gradient, product_gradient, atol=1e-4)


def test_each_that_is_missing_has_its_own_row():
    """So the sum tells who has left, and no row is named twice"""
    torch.manual_seed(0)
    encoder = hopplus_ppo.BoardEncoder(CONFIG, 8)
    board = boards().long()
    entities = CONFIG.num_players + CONFIG.num_prey
    missing = torch.rand(board[..., :entities].shape) < 0.3
    board[..., :entities] = board[..., :entities].masked_fill(missing, CONFIG.num_cells)
    cells = board[..., :entities]
    row = encoder.lookup[encoder.entity, cells[..., :1], cells]
    assert (row.sort(2).values.diff(dim=2) > 0).all(), "nothing counts twice"
    gone = cells == CONFIG.num_cells
    of_missing = {(entity, int(row[0, n, entity])) for _, n, entity in gone.nonzero().tolist()}
    assert len(of_missing) == len({number for _, number in of_missing}) == entities
    assert not {number for _, number in of_missing} & set(row[~gone].tolist())
    expected = encoder.mix(product(encoder.table, row).relu()).relu()
    assert torch.allclose(encoder(board.float()), expected, atol=1e-5)


def test_a_single_piece_of_wall_is_seen():
    """Else with --max-wall-pieces 1 all networks would be blind to walls"""
    torch.manual_seed(0)
    cells = CONFIG.num_cells
    config = dataclasses.replace(CONFIG, max_wall_pieces=1)
    board = boards(config)[:, :1].repeat(1, cells, 1)
    board[0, :, -cells:] = torch.eye(cells)
    features = hopplus_ppo.BoardEncoder(config, 32)(board)
    assert len(features[0].unique(dim=0)) == cells


def test_moas_clock_is_a_thermometer():
    """After k of the game's steps k ticks are on, in bfloat16, too; the last five are padding"""
    args = hopplus_ppo.Args(config=StagHuntConfig(final_time=35))
    moa = hopplus_ppo.ActionModel(args)
    read = []
    moa.head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    env = StagHuntEnv(args.config, 35)
    board = env.cells(env.state)[:, 0][None].float()
    clock = env.clock(env.state._replace(time=torch.arange(35)))[None]
    legal = env.legal_actions(env.state)[None, :, 0]
    for dtype in (torch.float32, torch.bfloat16):
        moa(board.to(dtype), clock.to(dtype), torch.zeros(1, 35, args.goal_dim, dtype=dtype), legal)
        ticks = read.pop()[0, :, args.subgoal_hidden :][:, :40]
        assert torch.equal(ticks.float(), (torch.arange(35)[:, None] > torch.arange(40)).float())
