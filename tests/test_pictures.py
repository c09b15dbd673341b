"""What the pictures show: who hunts, who is who, what is likely."""

from stag_hunt_env import CELL, COLOURS, StagHuntConfig, StagHuntEnv, render_planes, render_rgb

import numpy as np
import pytest
import torch
from PIL import ImageColor

CONFIG = StagHuntConfig(height=3, width=4, num_players=8, num_stags=1, num_hares=2)


def cells_that_differ(config, picture, other):
    """{cell: ...} of the board, and whether anything below it differs"""
    board = config.height * CELL
    different = (picture != other).any(2)
    blocks = different[:board].reshape(config.height, CELL, -1, CELL)[:, :, : config.width].any((1, 3))
    return set(np.flatnonzero(blocks).tolist()), bool(different[board:].any())


def test_hunters_get_a_ring():
    state = StagHuntEnv(CONFIG, 1, seed=1).initial_state()
    plain, actions = render_rgb(CONFIG, state), torch.tensor([0, 1, 2, 3, 4, 5, 6, 4])
    hunting = render_rgb(CONFIG, state, hunting=actions)
    cells = set(state.position[0, 5:7].tolist())
    assert cells_that_differ(CONFIG, plain, hunting) == (cells, False)
    assert np.array_equal(plain, render_rgb(CONFIG, state, hunting=torch.full((8,), 4)))


@pytest.mark.parametrize("on_prey", [False, True])
def test_everybody_on_one_cell_can_be_seen(on_prey):
    state = StagHuntEnv(CONFIG, 1, seed=1).initial_state()
    cell = int(state.prey_position[0, 0] if on_prey else state.position[0, 3])
    state = state._replace(position=torch.full_like(state.position, cell))
    row, column = divmod(cell, CONFIG.width)
    shown = render_rgb(CONFIG, state)[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
    for colour in COLOURS:
        assert (shown == ImageColor.getrgb(colour)).all(2).sum() > 100


@pytest.mark.parametrize("seat", [0, 3])
def test_planes_of_an_observation(seat):
    env = StagHuntEnv(CONFIG, 1, seed=1)
    state = env.initial_state()
    planes = env.observe(state)[0, seat]
    turned = state._replace(position=state.position.roll(-seat, 1))
    expected = render_rgb(CONFIG, turned)[: CONFIG.height * CELL, : CONFIG.width * CELL]
    assert np.array_equal(render_planes(CONFIG, planes), expected)
    assert np.array_equal(render_planes(CONFIG, planes, planes.float()), expected)


def test_what_is_only_likely_has_its_number():
    config = StagHuntConfig(height=2, width=4, num_players=2, num_hares=1)
    planes = torch.zeros(config.observation_shape)
    planes[0, 0, 0] = 1
    certain = render_planes(config, planes)
    nearly = planes.clone()
    nearly[0, 0, 0], nearly[0, 0, 1] = 0.995, 0.005
    assert np.array_equal(certain, render_planes(config, nearly))
    nearly[0, 0, 0], nearly[0, 1, 2] = 0.7, 0.3
    both = render_planes(config, nearly)
    assert cells_that_differ(config, certain, both)[0] == {0, 6}
    other = nearly.clone()
    other[0, 1, 2] = 0.25
    assert cells_that_differ(config, both, render_planes(config, other))[0] == {6}, "the number can be read"
    assert np.array_equal(both, render_planes(config, planes, nearly))
