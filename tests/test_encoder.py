"""The board encoder: on a CPU a sum of table rows, on a GPU the same as a product"""

import hopplus_mcts
import hopplus_ppo
import pretrain_vae
from stag_hunt_env import Seats, StagHuntConfig, StagHuntEnv, sample

import pytest
import torch
from torch.func import vmap

SCRIPTS = {"ppo": hopplus_ppo, "mcts": hopplus_mcts, "vae": pretrain_vae}
CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_stags=2, num_hares=2, final_time=9)


def one_hot_sum(table, index):
    """[rows, width], [n, k] -> each row that is named counts once"""
    named = torch.zeros(len(index), len(table)).scatter(1, index, 1.0)
    return named @ table


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_sums_of_rows_and_their_gradient(script):
    torch.manual_seed(0)
    table = torch.randn(3, 20, 5, requires_grad=True)  # of three learners
    index = torch.rand(3, 7, 20).argsort(2)[..., :4]
    sums = vmap(script.SumRows.apply)(table, index)
    expected = vmap(one_hot_sum)(table, index)
    assert torch.allclose(sums, expected, atol=1e-5)
    weight = torch.randn_like(sums)
    (gradient,) = torch.autograd.grad((sums * weight).sum(), table)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), table)
    assert torch.allclose(gradient, expected_gradient, atol=1e-5)
    alone = script.SumRows.apply(table[1], index[1])  # not in a vmap
    assert torch.allclose(alone, expected[1], atol=1e-5)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_is_not_there_counts_once(script):
    torch.manual_seed(0)
    env = StagHuntEnv(CONFIG, 64, seed=1)
    seats = Seats(env, [["mixed"] * 3])
    encoder = script.BoardEncoder(CONFIG, 8)
    missing = set()
    for _ in range(30):
        board = env.cells(env.state).flatten(0, 1).long()
        row = encoder.lookup[encoder.kind, board[:, :1], board]
        missing |= set((board == CONFIG.num_cells).sum(1).tolist())
        expected = encoder.mix(one_hot_sum(encoder.table, row).relu()).relu()
        assert torch.allclose(encoder(board, torch.zeros(len(board), 1)), expected, atol=1e-5)
        actions = sample(seats.action_probs(env.state))
        _, _, present_before, done = env.step(actions)
        seats.update(actions, present_before, done)
    assert {0, 2, 4} <= missing  # with each hare a hunter leaves


@pytest.mark.cuda
def test_both_ways_agree_on_a_gpu():
    torch.manual_seed(0)
    env = StagHuntEnv(CONFIG, 64, seed=1)
    board = env.cells(env.state).flatten(0, 1).long()
    board[::3, 1:3] = CONFIG.num_cells
    encoder = hopplus_ppo.BoardEncoder(CONFIG, 8)
    walls = torch.zeros(len(board), 1)
    expected = encoder(board, walls)
    found = encoder.cuda()(board.cuda(), walls.cuda()).cpu()
    assert torch.allclose(found, expected, atol=2e-3)  # tf32
