import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from nnx_gpt2 import GPT2Config, create_optimizer, create_train_state, make_eval_step, make_mesh, num_params
from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._resolve.target_devices import device_memory_bytes
from pretrain._training.device_memory import check_memory, compile_what_fits
from ray_jax_launch import OutOfMemoryError


def changed(*, model=None, train=None, mesh=None):
    config = with_vocab_size(PRESETS["quickstart"](), 257)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model or {}),
        train=dataclasses.replace(config.train, **train or {}),
        mesh=dataclasses.replace(config.mesh, **mesh or {}),
    )


@pytest.fixture
def fitting_vocab_size():
    """The vocabulary whose three float32 copies of an embedding of width 128 take all of the memory."""
    return device_memory_bytes() // (3 * 4 * 128)


def test_the_parameters_their_gradient_and_a_moment_must_fit(fitting_vocab_size):
    check_memory(changed(model={"vocab_size": fitting_vocab_size * 98 // 100}), make_mesh())
    with pytest.raises(OutOfMemoryError, match=r"must fit the [\d,.]+ GB of a device, got at least [\d,.]+ GB\. Lower"):
        check_memory(changed(model={"vocab_size": fitting_vocab_size * 102 // 100}), make_mesh())


def test_shards_of_the_parameters_must_fit(fitting_vocab_size):
    config = changed(model={"vocab_size": fitting_vocab_size * 3}, mesh={"fsdp": 2, "tensor": 2})
    check_memory(config, make_mesh())


def test_each_of_several_data_parallel_devices_has_all_parameters(fitting_vocab_size):
    mesh = jax.sharding.Mesh(np.array(jax.devices() * 8).reshape(8, 1, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(OutOfMemoryError):
        check_memory(changed(model={"vocab_size": fitting_vocab_size * 3}), mesh)


def test_twice_as_many_bytes_a_parameter_fit_half_as_many(fitting_vocab_size):
    check_memory(changed(model={"vocab_size": fitting_vocab_size * 9 // 20, "param_dtype": "float64"}), make_mesh())
    with pytest.raises(OutOfMemoryError):
        check_memory(
            changed(model={"vocab_size": fitting_vocab_size * 11 // 20, "param_dtype": "float64"}), make_mesh()
        )


def test_the_input_of_each_block_must_fit():
    config = changed()
    per_window = 4 * 64 * 128 * 4  # layers, positions, width, bytes
    assert (config.model.num_layers, config.model.seq_len, config.model.embed_dim) == (4, 64, 128)
    left = device_memory_bytes() - 3 * 4 * num_params(config.model)
    fitting = left // per_window // 8 * 8
    check_memory(changed(train={"global_batch_size": fitting}), make_mesh())
    with pytest.raises(OutOfMemoryError):
        check_memory(changed(train={"global_batch_size": fitting + 16}), make_mesh())
    check_memory(changed(train={"global_batch_size": 4 * fitting, "grad_accum_steps": 4}), make_mesh())


def test_inputs_of_two_bytes_fit_twice_as_often():
    config = changed(model={"dtype": "bfloat16"})
    left = device_memory_bytes() - 3 * 4 * num_params(config.model)
    fitting = left // (4 * 64 * 128 * 2) // 8 * 8
    check_memory(changed(model={"dtype": "bfloat16"}, train={"global_batch_size": fitting}), make_mesh())
    with pytest.raises(OutOfMemoryError):
        check_memory(changed(model={"dtype": "bfloat16"}, train={"global_batch_size": fitting + 16}), make_mesh())


def test_cpu_devices_share_the_memory_of_the_host(monkeypatch):
    host_bytes = device_memory_bytes()
    assert host_bytes > 1 << 28  # a number of pages would be less
    monkeypatch.setattr(jax, "local_device_count", lambda: 3)
    assert device_memory_bytes() == host_bytes // 3


def test_a_device_with_its_own_memory_has_the_limit_that_it_reports(monkeypatch):
    stats = {"bytes_limit": 700, "bytes_in_use": 5, "peak_bytes_in_use": 60, "largest_free_block_bytes": 650}
    devices = [SimpleNamespace(memory_stats=lambda: stats), SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1})]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert device_memory_bytes() == 700


def test_an_evaluation_takes_the_largest_batch_that_fits():
    model = GPT2Config(vocab_size=257, seq_len=64, num_layers=1, num_heads=1, embed_dim=64)
    params = create_train_state(model, create_optimizer(PRESETS["baby"]().optimizer, 10), jax.random.key(0)).params
    step = make_eval_step(model)
    compiled, batch_size = compile_what_fits(step, params, 10**8, 64, np.dtype(np.uint16))
    assert 1000 < batch_size < 10**8
    found = compiled.memory_analysis()
    assert found is not None
    needed_bytes = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    assert 0.1 < needed_bytes / device_memory_bytes() <= 0.5
    assert compile_what_fits(step, params, 7, 64, np.dtype(np.uint16))[1] == 7
