"""Pieces of a Pod are those of the API: each field exists there under the same name, is of the same kind, and is required where it is there."""

import re
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from kubernetes.client import models

from streamrl.spec import containers, core_v1, pod, volumes
from streamrl.spec.base import SpecModel

TYPED = {
    containers.Resources: "ResourceRequirements",
    containers.MainResources: "ResourceRequirements",
    containers.ClaimUse: "CoreV1ResourceClaim",
    containers.KeyRef: "SecretKeySelector",
    containers.ObjectRef: "SecretEnvSource",
    containers.EnvSource: "EnvVarSource",
    containers.EnvVar: "EnvVar",
    containers.EnvFrom: "EnvFromSource",
    containers.Capabilities: "Capabilities",
    containers.ContainerSecurity: "SecurityContext",
    containers.ExtraContainer: "Container",
    containers.ExtraMount: "VolumeMount",
    containers.ExtraPort: "ContainerPort",
    core_v1.PodFields: "PodSpec",
    pod.AddedCapabilities: "Capabilities",
    pod.ResourceClaim: "PodResourceClaim",
    volumes.ClaimVolume: "PersistentVolumeClaimVolumeSource",
    volumes.ConfigMapVolume: "ConfigMapVolumeSource",
    volumes.SecretVolume: "SecretVolumeSource",
    volumes.EmptyDirVolume: "EmptyDirVolumeSource",
    volumes.Volume: "Volume",
    volumes.VolumeMount: "VolumeMount",
}
"""Classes that are not called as the API's type is."""
SHAPES = TYPED | {
    one: one.__name__
    for one in vars(core_v1).values()
    if isinstance(one, type) and one.__module__ == core_v1.__name__ and one not in TYPED
}
ELSEWHERE: dict[type[SpecModel], set[str]] = {
    core_v1.PodFields: {"containers"},
    containers.ExtraMount: {"mountPath"},
    containers.ExtraPort: {"containerPort"},
}
"""What the API demands and is typed at another place, or left to the API server."""
_KINDS = {"str": str, "int": int, "bool": bool, "object": int, "datetime": str}


def of_api(name: str) -> dict[str, tuple[type, bool]]:
    """Field of a type -> its kind, and whether it must be there."""
    model = getattr(models, name if name.startswith("Core") else f"V1{name}")
    required = {each.serialization_alias or key for key, each in model.model_fields.items() if each.is_required()}
    return {alias: (_kind(model.openapi_types[key]), alias in required) for key, alias in model.attribute_map.items()}


def _kind(name: str) -> type:
    outer = re.match(r"(List|Dict)\[", name)
    return {"List": list, "Dict": dict}[outer[1]] if outer else _KINDS.get(name, dict)


def of_ours(annotation: Any) -> type:
    """The same of a type of ours."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return of_ours(arguments[0])
    if origin in (Union, UnionType):
        return of_ours(next(each for each in arguments if each is not type(None)))
    if origin is Literal:
        return type(arguments[0])
    found = {tuple: list}.get(origin or annotation, origin or annotation)
    return dict if issubclass(found, SpecModel) else found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_piece_is_the_apis(shape: type[SpecModel]) -> None:
    api = of_api(SHAPES[shape])
    ours = {field.alias or name: field for name, field in shape.model_fields.items()}
    assert ours.keys() <= api.keys()
    assert {name: of_ours(field.annotation) for name, field in ours.items()} == {name: api[name][0] for name in ours}
    demanded = {name for name, (_, is_required) in api.items() if is_required}
    assert {name for name in demanded if name not in ours or not ours[name].is_required()} <= ELSEWHERE.get(
        shape, set()
    )


def test_every_field_that_goes_as_it_is_can_be_enforced() -> None:
    assert set(get_args(core_v1.PodField)) == {each.alias for each in core_v1.PodFields.model_fields.values()}
