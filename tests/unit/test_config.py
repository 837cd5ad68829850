"""The packaged defaults, the user's configuration on top of them, and its check."""

from __future__ import annotations

import dataclasses
import pickle
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from transfer_queue.config import defaults, load


class Sampler:
    pass


@dataclasses.dataclass
class DataSampler:
    seed: int = 1


def storage(**section: Any) -> dict[str, Any]:
    return {"backend": {"SimpleStorage": section}}


def test_defaults_are_those_of_the_peer_and_ours():
    conf = yaml.safe_load((resources.files("transfer_queue") / "config.yaml").read_text())
    assert conf == defaults()
    assert conf["metrics"] == {"enabled": False, "port": 0}
    assert conf["controller"] == {
        "sampler": "SequentialSampler",
        "sampler_timeout_s": 30,
        "polling_mode": False,
        "zmq_info": None,
        "journal": {"durability": "none", "path": None, "restart_wait_s": 30},
    }
    assert (conf["runtime"], conf["namespace"], conf["client"]) == (
        "auto",
        "default",
        {"timeout_s": 60, "layout": "jagged"},
    )
    backend = conf["backend"]
    assert (backend["storage_backend"], backend["RayStore"]) == ("SimpleStorage", None)
    assert backend["SimpleStorage"] == {
        "total_storage_size": None,
        "num_data_storage_units": 2,
        "zmq_info": None,
        "required_node_resource": None,
        "memory_limit_bytes": None,
        "disk_limit_bytes": None,
        "put_wait_s": 30,
        "high_watermark": 0.9,
        "low_watermark": 0.7,
        "ssd_offload": {
            "enabled": False,
            "path": None,
            "threshold_bytes": 1048576,
            "durability": "none",
            "glibc_mmap_threshold_bytes": 1048576,
        },
    }
    assert backend["MooncakeStore"]["offload"]["client_port"] == 42052
    assert backend["MooncakeStore"]["global_segment_size"] == 4 << 30
    assert backend["Yuanrong"]["worker_args"] == "--shared_memory_size_mb 8192"


@pytest.mark.parametrize("nothing", [None, {}, DictConfig({}), DictConfig(None), ""])
def test_nothing_means_the_defaults(nothing):
    conf = load(nothing)
    assert isinstance(conf, DictConfig)
    assert OmegaConf.to_container(conf) == defaults()


@pytest.mark.parametrize("backend", ["SimpleStorage", "MooncakeStore", "Yuanrong", "RayStore", "mine"])
def test_defaults_pass_the_check_with_every_backend(backend):
    assert load({"backend": {"storage_backend": backend}}).backend.storage_backend == backend


def test_omegaconf_is_not_imported_before_it_is_needed():
    code = "import sys, transfer_queue.config; sys.exit('omegaconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_users_values_win_and_the_rest_stays():
    conf = load({"client": {"layout": "dense"}, **storage(num_data_storage_units=5)})
    assert (conf.client.layout, conf.client.timeout_s) == ("dense", 60)
    assert conf.backend.SimpleStorage.num_data_storage_units == 5
    assert conf.backend.SimpleStorage.put_wait_s == 30


def test_foreign_keys_pass_untouched():
    foreign = {"enable": True, "metrics": {"labels": {"a": [1, 2]}}, "backend": {"mine": {"x": None}}, "other": None}
    conf = load(foreign)
    assert (conf.enable, conf.metrics.labels.a, conf.metrics.port, conf.other) == (True, [1, 2], 0, None)
    assert conf.backend.mine == {"x": None}
    conf.controller.zmq_info = {"ip": "a"}
    conf.metrics.endpoint = "host:1"


def test_a_section_given_as_null_is_not_given():
    conf = load({"client": None, "backend": {"SimpleStorage": None, "MooncakeStore": {"offload": None}}})
    assert OmegaConf.to_container(conf) == defaults()


def test_inputs_are_not_modified_and_results_are_apart():
    given = {"client": {"layout": "dense"}}
    first, second = load(given), load(given)
    first.client.layout = "jagged"
    first.controller.sampler = "other"
    assert given == {"client": {"layout": "dense"}}
    assert (second.client.layout, second.controller.sampler) == ("dense", "SequentialSampler")
    assert load().controller.sampler == "SequentialSampler"


def test_configs_of_omegaconf_are_taken_with_their_interpolations():
    whole = OmegaConf.create(
        {"units": 3, "tq": {"backend": {"SimpleStorage": {"num_data_storage_units": "${units}"}}, "later": "${nope}"}}
    )
    conf = load(whole.tq)
    assert conf.backend.SimpleStorage.num_data_storage_units == 3
    assert whole.tq.backend.SimpleStorage.num_data_storage_units == 3
    inner = load({"client": {"timeout_s": "${backend.SimpleStorage.put_wait_s}"}})
    assert inner.client.timeout_s == 30
    assert load(OmegaConf.create({"client": {"timeout_s": "${n}"}, "n": 5})).client.timeout_s == 5
    with pytest.raises(ValueError, match=r"client\.timeout_s: cannot be resolved"):
        load({"client": {"timeout_s": "${nope}"}})


def test_values_still_to_be_given_are_not_given():
    assert load({"client": {"layout": "???"}}).client.layout == "jagged"
    assert load(OmegaConf.create({"a": {"client": {"layout": "???"}}}).a).client.layout == "jagged"


def test_a_dataclass_is_a_configuration_too():
    @dataclasses.dataclass
    class Mine:
        namespace: str = "mine"

    assert load(Mine()).namespace == "mine"


@pytest.mark.parametrize("sampler", [Sampler, Sampler(), DataSampler, DataSampler(3)], ids=repr)
def test_samplers_survive_and_the_result_pickles(sampler):
    conf = load({"controller": {"sampler": sampler}})
    assert conf.controller.sampler is sampler
    again = load(pickle.loads(pickle.dumps(conf))).controller.sampler
    assert again is sampler if isinstance(sampler, type) else type(again) is type(sampler)


def test_objects_in_a_config_of_omegaconf_survive():
    sampler = Sampler()
    conf = OmegaConf.create({"controller": {"sampler": sampler}}, flags={"allow_objects": True})
    assert load(conf).controller.sampler is sampler


WRONG = [
    ({"runtime": "slurm"}, "runtime: got 'slurm', want 'auto' or 'embedded' or 'attach' or 'ray'"),
    ({"namespace": ""}, "namespace: got '', want 1 to 64"),
    ({"namespace": "../x"}, "namespace: got '../x'"),
    ({"controller": {"journal": {"durability": True}}}, "controller.journal.durability: got True, want 'none' or"),
    ({"controller": {"journal": {"durability": "strict"}}}, "controller.journal.path: got None, want a directory"),
    ({"controller": {"journal": {"path": 3}}}, "controller.journal.path: got 3, want null or a directory"),
    ({"controller": {"journal": {"path": "a\0b"}}}, "controller.journal.path: got 'a\\x00b', want null or a directory"),
    ({"controller": {"journal": {"restart_wait_s": 0}}}, "controller.journal.restart_wait_s: got 0, want a number"),
    ({"client": {"timeout_s": 0}}, "client.timeout_s: got 0, want a number above 0"),
    ({"client": {"timeout_s": True}}, "client.timeout_s: got True"),
    ({"client": {"layout": "padded"}}, "client.layout: got 'padded', want 'jagged' or 'dense'"),
    ({"client": 5}, "client: got 5, want a mapping"),
    ({"metrics": {"enabled": "yes"}}, "metrics.enabled: got 'yes', want true or false"),
    ({"metrics": {"port": 70000}}, "metrics.port: got 70000, want a whole number from 0 to 65535"),
    ({"metrics": {"host": 5}}, "metrics.host: got 5, want null or a name"),
    ({"metrics": {"host": ""}}, "metrics.host: got '', want null or a name"),
    ({"controller": {"polling_mode": 1}}, "controller.polling_mode: got 1"),
    ({"backend": {"storage_backend": None}}, "backend.storage_backend: got None, want a name"),
    (
        storage(num_data_storage_units=0),
        "backend.SimpleStorage.num_data_storage_units: got 0, want a whole number of at least 1",
    ),
    (storage(num_data_storage_units=1.5), "num_data_storage_units: got 1.5"),
    (storage(num_data_storage_units=None), "num_data_storage_units: got None"),
    (storage(total_storage_size=-1), "total_storage_size: got -1, want null or a whole number"),
    (storage(memory_limit_bytes="8g"), "memory_limit_bytes: got '8g', want null or"),
    (storage(put_wait_s=-1), "put_wait_s: got -1, want a number of at least 0"),
    (storage(high_watermark=1.5), "high_watermark: got 1.5, want a number above 0 and at most 1"),
    (storage(low_watermark=0.95), "low_watermark: got 0.95, want less than high_watermark 0.9"),
    (storage(ssd_offload={"enabled": 1}), "ssd_offload.enabled: got 1"),
    (storage(ssd_offload={"enabled": True}), "backend.SimpleStorage.ssd_offload.path: got None, want a directory"),
    (storage(ssd_offload={"enabled": True, "path": "/x", "threshold_bytes": 0}), "threshold must be greater than zero"),
    (storage(ssd_offload={"enabled": True, "path": "/x", "durability": True}), "durability: got True, want 'none' or"),
    (
        storage(ssd_offload={"enabled": True, "path": "/x", "glibc_mmap_threshold_bytes": 0}),
        "glibc_mmap_threshold_bytes: got 0",
    ),
    (
        {"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": {"hard_pin": 3}}},
        "MooncakeStore.hard_pin: got 3",
    ),
    ([1], "got a value of type list, want a mapping"),
    (5, "got a value of type int"),
]


@pytest.mark.parametrize(("conf", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_values_are_refused_with_key_value_and_want(conf, message):
    with pytest.raises(ValueError, match=f"^config: .*{re.escape(message)}"):
        load(conf)


def test_a_section_that_is_not_used_may_hold_anything():
    load({"backend": {"storage_backend": "SimpleStorage", "MooncakeStore": {"hard_pin": 3}}})
    load({"backend": {"SimpleStorage": {"put_wait_s": 1}, "MooncakeStore": {"hard_pin": 3}}})
    load(storage(ssd_offload={"threshold_bytes": 0}))
    load({"backend": {"storage_backend": "RayStore", "SimpleStorage": {"num_data_storage_units": 0}}})


def test_whole_floats_and_paths_become_what_is_wanted(tmp_path):
    conf = load(storage(memory_limit_bytes=4e9, ssd_offload={"enabled": True, "path": Path(tmp_path)}))
    assert type(conf.backend.SimpleStorage.memory_limit_bytes) is int
    assert conf.backend.SimpleStorage.ssd_offload.path == str(tmp_path)


@pytest.mark.parametrize("name", ["MooncakeStore", "Yuanrong", "RayStore"])
@pytest.mark.parametrize(
    "more", [{}, {"SimpleStorage": None}, {"storage_backend": "???"}, {"foreign": {"x": 1}}], ids=str
)
def test_a_section_of_another_backend_alone_is_a_contradiction(name, more):
    with pytest.raises(
        ValueError, match=rf"^config: backend\.{name}: given without backend\.storage_backend, .*'SimpleStorage'"
    ):
        load({"backend": {name: {"worker_port": 1234, "hard_pin": True}, **more}})


def test_all_sections_that_contradict_are_named():
    both = {"backend": {"MooncakeStore": {"protocol": "rdma"}, "Yuanrong": {"worker_port": 1}}}
    for conf in (both, OmegaConf.create(both), OmegaConf.create({"tq": both}).tq):
        with pytest.raises(ValueError, match=r"backend\.MooncakeStore and backend\.Yuanrong: given without"):
            load(conf)


def test_the_packaged_sections_contradict_nothing():
    whole = defaults()
    del whole["backend"]["storage_backend"]
    assert OmegaConf.to_container(load(whole)) == defaults()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("simplestorage", "SimpleStorage"),
        ("SimpleStroage", "SimpleStorage"),
        ("Simple_Storage", "SimpleStorage"),
        ("MooncakeStorage", "MooncakeStore"),
        ("YuanRong", "Yuanrong"),
        ("storage_backnd", "storage_backend"),
    ],
)
def test_a_misspelt_section_is_refused_by_name(wrong, right):
    for value in ({"num_data_storage_units": 5}, None, "MooncakeStore"):
        with pytest.raises(ValueError, match=rf"^config: backend\.{wrong}: nothing is called so, want '{right}'"):
            load({"backend": {"storage_backend": "SimpleStorage", wrong: value}})
