"""The package has all that turboattention.h declares."""

import hashlib
import importlib.metadata
import json
import pathlib
import re
import subprocess

import pytest

import turboattention as ta
from turboattention import _core, _enums, _options

ROOT = pathlib.Path(__file__).resolve().parents[3]
HEADER = (ROOT / "include/turboattention.h").read_text()
PLAIN = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)


def camel(name):
    return "".join(part.capitalize() for part in name.split("_"))


def fields_of(struct):
    body = re.search(r"typedef struct %s \{(.*?)\n?\} %s;" % (struct, struct), PLAIN, re.S).group(1)
    names = re.findall(r"(\w+)(?:\[\w+\])?\s*[,;]", re.sub(r"\(\*(\w+)\)\([^)]*\)", r" \1", body))
    # Lengths of arrays are the arrays' own here.
    return {name for name in names
            if name != "struct_size" and not name.startswith("reserved") and name.removeprefix("n_") not in set(names) - {name}}


def test_every_function_is_called():
    declared = set(re.findall(r"^TA_API [^;]*?\b(ta_\w+)\(", PLAIN, re.M))
    assert len(declared) > 70
    symbols = subprocess.run(["nm", "-D", "--undefined-only", _core.__file__], capture_output=True, text=True, check=True).stdout
    # ta_calibrator_create_for does all that ta_calibrator_create does.
    assert declared - set(re.findall(r"\bta_\w+", symbols)) == {"ta_calibrator_create"}
    hpp = (ROOT / "bindings/cpp/include/turboattention.hpp").read_text()
    assert declared - set(re.findall(r"\bta_\w+", hpp)) == set()


def test_every_constant_has_a_name():
    classes = {"dtype": "DType", "device_kind": "Device", "nonfinite": "NonFinite"}
    for enum, body in re.findall(r"enum ta_(\w+)_code \{(.*?)\}", PLAIN, re.S):
        if enum == "switch":  # None, True, False
            continue
        members = {name: int(value, 0) for name, value in re.findall(r"TA_(\w+) = (-?\w+)", body)}
        names = getattr(_enums, classes.get(enum, camel(enum))).__members__
        assert sorted(members.values()) == sorted(int(value) for value in names.values()), enum
        for name, value in members.items():
            assert any(name.endswith(python) and value == number for python, number in names.items()), name


def test_every_field_is_there():
    results = {"context_info": "ContextInfo", "kv_pool_stats": "PoolStats", "namespace_stats": "NamespaceStats",
               "move_info": "MoveInfo", "residency": "Residency", "tier_stats": "TierStats", "move_stats": "MoveStats",
               "fit": "Fit", "group_info": "GroupInfo", "group_peer": "PeerInfo", "transfer_info": "TransferInfo",
               "prefix_event": "PrefixEvent", "prefix_place": "PrefixPlace", "block_info": "BlockInfo",
               "store_stats": "StoreStats", "memory_range": "MemoryRange"}
    for struct, name in results.items():
        assert fields_of(f"ta_{struct}") == set(getattr(_core, name)._fields), struct
    options = {"numerics": "Numerics", "tier_options": "Tiers", "kv_pool_description": "PoolDescription", "layer_group": "LayerGroup"}
    for struct, name in options.items():
        assert fields_of(f"ta_{struct}") == set(getattr(_options, name).__dataclass_fields__), struct
    assert fields_of("ta_rotary") - {"layers"} == set(_options.Rotary.__dataclass_fields__), "the shape of angles tells of layers"
    assert fields_of("ta_error") - {"code"} <= set(ta.Error.__annotations__)
    calls = {"step_options": ta.Plan.step, "attend_options": ta.Step.attend, "dense_options": ta.Context.attend_dense,
             "kv_pool_options": ta.Context.create_pool, "context_options": ta.Context.__init__, "group_options": ta.Context.create_group,
             "partition_options": ta.Sequence.partition, "namespace_options": ta.Pool.create_namespace,
             "store_options": ta.Namespace.attach_store, "retention": ta.Sequence.retain}
    for struct, call in calls.items():
        given = set(re.findall(r"(\w+): ", call.__nb_signature__[0][0]))
        assert fields_of(f"ta_{struct}") - {"batch", "attend"} <= given, struct
    by_other_means = {"rotary", "error", "tensor", "allocator", "log_sink", "progress", "sink", "loaded_seq", "block_store", "store_item",
                      "group_id"}
    assert set(re.findall(r"typedef struct ta_(\w+) \{", PLAIN)) == {*results, *options, *calls, *by_other_means}


def test_the_wheel_lists_what_its_binaries_contain():
    names = importlib.metadata.packages_distributions().get("turboattention")
    if not names:
        pytest.skip("not installed as a wheel")
    files = {pathlib.Path(file).name: file.locate() for file in importlib.metadata.files(names[0])}
    sbom = json.loads(files["turboattention.spdx.json"].read_text())
    listed = {pathlib.Path(file["fileName"]).name: file["checksums"][-1]["checksumValue"] for file in sbom["files"]}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if ".so" in name}
    contained = {r["relatedSpdxElement"] for r in sbom["relationships"] if r["relationshipType"] == "CONTAINS"}
    names = {package["name"] for package in sbom["packages"] if package["SPDXID"] in contained}
    assert {"nanobind", "robin-map", "xxHash", "libstdc++ and libgcc"} <= names
    notice = files["NOTICE"].read_text()
    assert all(name.split(" (")[0] in notice for name in names), names


def test_every_object_is_documented():
    for name, item in vars(_core).items():
        if name.startswith("_"):
            continue
        assert item.__doc__, name
        if isinstance(item, type) and not hasattr(item, "_fields"):
            for member, value in vars(item).items():
                assert member.startswith("_") or value.__doc__, f"{name}.{member}"
