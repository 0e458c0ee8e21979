"""The devices that programs are compiled for."""

import jax
import jax.numpy as jnp
import optax
import pytest

from nnx_gpt2 import abstract_train_state, batch_sharding, create_train_state, make_mesh
from nnx_gpt2._target import compiled_for, compiled_for_each, default_device, target_for


def test_a_state_without_a_mesh_lies_on_the_default_device(tiny):
    first, *_, chosen = jax.devices()
    rule = optax.sgd(1.0)
    assert default_device() == first
    with jax.default_device("cpu"):
        assert default_device() == first
    with jax.default_device(chosen):
        assert default_device() == chosen
        abstract, state = abstract_train_state(tiny, rule), create_train_state(tiny, rule, jax.random.key(0))
        given = create_train_state(tiny, rule, jax.random.key(0), params=state.params)
    for tree in (abstract, state, given):
        assert {device for leaf in jax.tree.leaves(tree) for device in leaf.sharding.device_set} == {chosen}


def test_the_target_is_that_of_the_step_or_else_of_the_array():
    devices = jax.devices()
    mesh = make_mesh(devices=devices[4:])
    one, spread = jax.device_put(jnp.zeros(8), devices[2]), jax.device_put(jnp.zeros(8), batch_sharding(mesh))
    found = [target_for(one), target_for(spread)]
    jax.jit(lambda x: found.append(target_for(x)))(spread)
    for context in (compiled_for(mesh), compiled_for_each(mesh), compiled_for(None)):
        with context:
            found.append(target_for(one))
    with pytest.raises(KeyError), compiled_for(mesh):
        raise KeyError
    found.append(target_for(one))
    assert [target.num_devices for target in found] == [1, 4, None, 4, 1, 1, 1]
    places = [found[0], *found[2:]]
    assert [target.device for target in places] == [devices[i] for i in (2, 0, 4, 4, 0, 2)]
    assert found[1].device in devices[4:]
