import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_gpt2 import GPT2Config, OptimizerConfig, create_optimizer, create_train_state, learning_rate_schedule

CONFIG = GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)


def by_name(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize(
    ("fields", "steps", "rates"),
    [
        ({}, (0, 1, 4, 8, 12, 20), (2e-4, 4e-4, 1e-3, 5.5e-4, 1e-4, 1e-4)),
        ({"schedule": "constant"}, (0, 1, 4, 8, 12, 20), (2e-4, 4e-4, 1e-3, 1e-3, 1e-3, 1e-3)),
        ({"schedule": "wsd", "decay_steps": 4}, (0, 4, 8, 10, 12, 20), (2e-4, 1e-3, 1e-3, 5.5e-4, 1e-4, 1e-4)),
        ({"schedule": "wsd"}, (4, 10, 11, 12), (1e-3, 1e-3, 5.5e-4, 1e-4)),  # a fifth of 13 steps is 2
        ({"schedule": "wsd", "decay_steps": 1}, (4, 11, 12), (1e-3, 1e-3, 1e-4)),
        ({"schedule": "wsd", "decay_steps": 9}, (3, 4, 12), (8e-4, 9e-4, 1e-4)),  # no plateau: 8/9 of 9e-4, and 1e-4
        ({"schedule": "constant", "warmup_steps": 0}, (0, 5), (1e-3, 1e-3)),
    ],
)
def test_learning_rate_over_a_run_of_thirteen_steps(fields, steps, rates):
    """The steps are 0 to 12. A cosine from step 4 to step 12 is half way down at step 8."""
    config = OptimizerConfig(**{"learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 4} | fields)
    schedule = learning_rate_schedule(config, 13)
    np.testing.assert_allclose([float(schedule(step)) for step in steps], rates, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize(("max_steps", "warmup"), [(1, 0), (2, 0), (2, 1), (3, 2), (7, 3), (2000, 100), (2**31 - 1, 9)])
def test_the_last_step_has_exactly_the_minimum(schedule, max_steps, warmup):
    for smallest in (3e-5, 0.0):
        config = OptimizerConfig(schedule=schedule, learning_rate=7e-4, min_learning_rate=smallest, warmup_steps=warmup)
        assert learning_rate_schedule(config, max_steps)(max_steps - 1) == jnp.float32(smallest)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, 6e-5),
        ({"learning_rate": 3e-5}, 3e-6),  # a peak below the default minimum of GPT-2 124M
        ({"learning_rate": 2.0, "min_learning_rate_ratio": 0.25}, 0.5),
        ({"min_learning_rate_ratio": 0.0}, 0.0),
        ({"min_learning_rate_ratio": 1.0}, 6e-4),
        ({"min_learning_rate_ratio": 0.5, "min_learning_rate": 1e-5}, 1e-5),
        ({"min_learning_rate_ratio": 0.5, "min_learning_rate": 0.0}, 0.0),
    ],
)
def test_the_last_step_has_a_share_of_the_peak_or_the_given_minimum(schedule, fields, last):
    config = OptimizerConfig(schedule=schedule, warmup_steps=2, **fields)
    assert learning_rate_schedule(config, 13)(12) == jnp.float32(last) == jnp.float32(config.final_learning_rate)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_schedule_is_one_program_for_all_steps_and_runs(schedule, compiled):
    config = OptimizerConfig(schedule=schedule, learning_rate=1.25e-3, warmup_steps=3, decay_steps=4)
    for max_steps, num_programs in [(41, 1), (41, 1), (42, 2)]:
        rate = learning_rate_schedule(config, max_steps)
        assert float(rate(3)) == pytest.approx(1.25e-3)
        assert float(rate(0)) == pytest.approx(1.25e-3 / 4)
        assert len(compiled) == num_programs


LENGTHS = [1, 2, 3, 5, 7, 8, 9, 11, 13, 20, 31, 50, 97, 1000]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "decay"), [(0, None), (1, None), (7, None), (7, 1), (3, 4)])
def test_runs_of_two_lengths_have_the_same_rates_before_the_decay_and_different_ones_after(schedule, warmup, decay):
    config = OptimizerConfig(schedule=schedule, learning_rate=7e-4, warmup_steps=warmup, decay_steps=decay)
    lengths = [x for x in LENGTHS if schedule != "wsd" or warmup + (decay or max(x // 5, 1)) <= x]
    rates = {x: np.asarray(jax.vmap(learning_rate_schedule(config, x))(np.arange(x))) for x in lengths}
    assert {x.dtype for x in rates.values()} == {np.dtype(np.float32)}
    num_different = 0
    for one, other in itertools.combinations(lengths, 2):
        same = min(config.num_steps_before_decay(one), config.num_steps_before_decay(other))
        np.testing.assert_array_equal(rates[one][:same], rates[other][:same])
        if same < one and schedule != "constant":
            assert rates[one][same] != rates[other][same], (one, other)
            num_different += 1
    assert num_different > 20 or schedule == "constant"


@pytest.mark.parametrize(
    ("schedule", "max_steps", "expected"),
    [
        ("cosine", 9, 5), ("cosine", 6, 5), ("cosine", 5, 4), ("cosine", 4, 4), ("cosine", 3, 3),
        ("wsd", 15, 12), ("wsd", 14, 12), ("wsd", 5, 4), ("constant", 15, 15), ("constant", 1, 1),
    ],
)  # fmt: skip
def test_steps_before_the_decay_of_a_warmup_of_four_steps(schedule, max_steps, expected):
    """Step 4 of a cosine has the peak, unless it is the last step. A fifth of 14 steps is 2."""
    assert OptimizerConfig(schedule=schedule, warmup_steps=4).num_steps_before_decay(max_steps) == expected


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_run_that_ends_in_its_warmup_has_the_rates_of_the_warmup(schedule):
    config = OptimizerConfig(schedule=schedule, learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=4)
    rates = learning_rate_schedule(config, 3)
    np.testing.assert_allclose([float(rates(step)) for step in range(3)], [2e-4, 4e-4, 6e-4], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "of_matrices"),
    [
        ({"name": "adamw"}, 3e-3 * 0.5),
        ({"name": "muon"}, 3e-3 * 0.5),
        ({"name": "muon", "muon_learning_rate": 6e-2, "muon_weight_decay": 0.25}, 2e-2 * 0.25),
        ({"name": "muon", "muon_weight_decay": 0.0}, 0.0),
    ],
)
def test_weights_decay_and_biases_and_norms_do_not(fields, of_matrices):
    """The first of two steps of warmup has a third of the rate."""
    config = OptimizerConfig(learning_rate=9e-3, min_learning_rate=3e-4, warmup_steps=2, weight_decay=0.5, **fields)
    optimizer = create_optimizer(config, 10)
    params = create_train_state(CONFIG, optimizer, jax.random.key(0)).params
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    shares = {"kernel": of_matrices, "embedding": 3e-3 * 0.5}
    expected = {name: -shares.get(name.split(".")[-1], 0) * np.asarray(x) for name, x in by_name(params).items()}
    assert any(leaf.any() for leaf in expected.values())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), by_name(updates), expected)


@pytest.mark.parametrize(("scan_layers", "scaling"), [(False, "spectral"), (True, "rms")])
def test_muon_makes_each_matrix_of_the_blocks_nearly_orthogonal(scan_layers, scaling):
    """Singular values of q, k and v are near each other. AdamW updates embeddings and biases by their signs."""
    config = OptimizerConfig(
        name="muon", learning_rate=1.0, min_learning_rate=1.0, weight_decay=0.0, clip_norm=0.0, muon_scaling=scaling
    )
    optimizer = create_optimizer(config, 10)
    shape = GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32, scan_layers=scan_layers)
    params = create_train_state(shape, optimizer, jax.random.key(0)).params
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    for name, update in by_name(jax.tree.map(np.asarray, updates)).items():
        if name.endswith("kernel"):
            matrices = np.moveaxis(update, -2, -3) if name.endswith("c_attn.kernel") else update
            fan_in, fan_out = matrices.shape[-2:]
            length = 0.2 * max(fan_in, fan_out) ** 0.5 if scaling == "rms" else max(1, fan_out / fan_in) ** 0.5
            singular = np.linalg.svd(matrices, compute_uv=False) / length
            # A random square matrix has a few singular values near zero, which stay small.
            assert 0.6 < np.quantile(singular, 0.2) < singular.max() < 1.3, name
        else:
            np.testing.assert_allclose(np.abs(update), 1.0, rtol=1e-3)


def test_gradients_are_clipped_before_the_update_rule():
    params = {"kernel": jnp.zeros((2, 2))}
    for clip_norm, factor in ((1.0, 0.1), (0.0, 1.0)):
        optimizer = create_optimizer(OptimizerConfig(clip_norm=clip_norm), 10)
        _, state = optimizer.update({"kernel": jnp.full((2, 2), 5.0)}, optimizer.init(params), params)
        (mu,) = (leaf for name, leaf in by_name(state).items() if name.endswith("mu.kernel"))
        np.testing.assert_allclose(mu, 0.1 * 5.0 * factor, rtol=1e-5)
    assert float(optax.tree.norm(params)) == 0


def test_updates_are_those_of_adamw_in_numpy():
    """Three steps. The last gradient is not clipped, and the bias does not decay."""
    config = OptimizerConfig(
        learning_rate=0.1, min_learning_rate=0.01, warmup_steps=2, weight_decay=0.3, beta1=0.8, beta2=0.9, clip_norm=2.0
    )
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}
    optimizer = create_optimizer(config, 10)
    ours: Any = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(ours)
    mean, square = ({name: np.zeros_like(x) for name, x in params.items()} for _ in range(2))
    for count, (rate, scale) in enumerate(((1 / 30, 3.0), (2 / 30, 5.0), (0.1, 0.1)), start=1):
        grads = {name: scale * rng.normal(size=x.shape) for name, x in params.items()}
        grads["bias"][1] *= 1e-8  # as small as the epsilon
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, grads), state, ours)
        ours = optax.apply_updates(ours, updates)
        length = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
        assert (length > 2) == (count < 3)
        for name, grad in grads.items():
            clipped = grad * min(1, 2 / length)
            mean[name] = 0.8 * mean[name] + 0.2 * clipped
            square[name] = 0.9 * square[name] + 0.1 * clipped**2
            step = mean[name] / (1 - 0.8**count) / (np.sqrt(square[name] / (1 - 0.9**count)) + 1e-8)
            params[name] = params[name] - rate * (step + (0.3 * params[name] if name == "kernel" else 0))
            np.testing.assert_allclose(ours[name], params[name], rtol=1e-5, atol=1e-6)


def orthogonal(matrix):
    """Five iterations of Newton and Schulz with the coefficients of Jordan et al."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.parametrize("scaling", ["rms", "spectral"])
def test_updates_are_those_of_muon_in_numpy(scaling):
    """Four updates: a momentum of 0.85, 0.875, 0.9 and 0.9, and two schedules with a decay of one step."""
    config = OptimizerConfig(
        name="muon", schedule="wsd", learning_rate=0.1, min_learning_rate=0.02, decay_steps=1, clip_norm=0.0,
        weight_decay=0.5, muon_learning_rate=0.3, muon_weight_decay=0.2, muon_scaling=scaling, muon_momentum=0.9,
        muon_momentum_warmup_steps=2,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    matrix, mean = rng.normal(size=(3, 4)), np.zeros((3, 4))
    optimizer = create_optimizer(config, 4)
    ours: Any = {"c_fc": {"kernel": jnp.asarray(matrix), "bias": jnp.zeros(4)}}
    state = optimizer.init(ours)
    for count, beta in enumerate((0.85, 0.875, 0.9, 0.9), start=1):
        grad = rng.normal(size=(3, 4))
        given = {"c_fc": {"kernel": jnp.asarray(grad), "bias": jnp.ones(4)}}
        updates, state = optimizer.update(given, state, ours)
        ours = optax.apply_updates(ours, updates)
        mean = beta * mean + (1 - beta) * grad
        # Nesterov, with the bias corrections of optax.
        ahead = beta * mean / (1 - beta ** (count + 1)) + (1 - beta) * grad / (1 - beta**count)
        length = 0.2 * 4**0.5 if scaling == "rms" else (4 / 3) ** 0.5
        rate = 0.3 if count < 4 else 0.06  # a fifth of the peak, as that of AdamW
        matrix = matrix - rate * (length * orthogonal(ahead) + 0.2 * matrix)
        np.testing.assert_allclose(ours["c_fc"]["kernel"], matrix, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours["c_fc"]["bias"], -0.1 * min(count, 3) - 0.02 * (count == 4), rtol=1e-4)


def test_a_warmup_of_the_momentum_begins_at_most_at_the_momentum():
    """A smaller momentum than 0.85 is that of all updates."""
    ends = []
    for steps in (0, 5):
        config = OptimizerConfig(name="muon", muon_momentum=0.5, muon_momentum_warmup_steps=steps)
        optimizer, params = create_optimizer(config, 10), {"kernel": jnp.eye(3)}
        updates: Any
        updates, state = optimizer.update({"kernel": jnp.ones((3, 3))}, optimizer.init(params), params)
        updates, _ = optimizer.update({"kernel": jnp.eye(3)}, state, params)
        ends.append(updates["kernel"])
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


def test_runs_that_are_too_short_are_rejected():
    with pytest.raises(ValueError, match="max_steps must be at least 1 and at most 2147483647, got 0"):
        create_optimizer(OptimizerConfig(), 0)
    config = OptimizerConfig(schedule="wsd", warmup_steps=5, decay_steps=6)
    message = "warmup_steps and decay_steps must fit into the 10 steps of the run, got 5 and 6."
    with pytest.raises(ValueError, match=re.escape(message)):
        create_optimizer(config, 10)
