"""docker/launch/jobset.yaml: fields are those of JobSet and Kubernetes, its pods those of the Jobs.

The models of Kubeflow Trainer have the fields and types of JobSet, of Job and of all that is in
them, made from JobSet's own Go types. They ignore a field that they do not know, so what they read
is compared with what they write. What values a text may have is not in the models.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from launch_files import JOBSET, KUBERNETES, PARTS, resources
from pydantic import ValidationError


def is_a_jobset(text: str) -> bool:
    """Whether each field is one of JobSet, Job or Pod, and each value of the field's type."""
    given = yaml.safe_load(text)
    try:
        read = JobsetV1alpha2JobSet.from_dict(given)
    except ValidationError:
        return False
    return read is not None and read.to_dict() == given


def test_the_fields_are_those_of_jobset_and_job() -> None:
    assert is_a_jobset(JOBSET)
    given = yaml.safe_load(JOBSET)
    assert (given["apiVersion"], given["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert given["spec"]["successPolicy"]["operator"] in ("All", "Any")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("successPolicy:", "succesPolicy:"),
        ("maxRestarts: 3", "restarts: 3"),
        ("backoffLimit: 6", "backofLimit: 6"),
        ("workingDir: /volume", "workdir: /volume"),
        ("{claimName:", "{claim:"),
        ("maxRestarts: 3", 'maxRestarts: "three"'),
        ("parallelism: 2", "parallelism: two"),
        ("- name: sampler\n", "- names: sampler\n"),
    ],
)
def test_other_fields_and_types_are_found(before: str, after: str) -> None:
    assert before in JOBSET
    assert not is_a_jobset(JOBSET.replace(before, after, 1))


def wrong_set(text: str) -> list[str]:
    """What does not fit together in the set, and which pods are not those of kubernetes.yaml."""
    there, wrong = resources(), []
    ((_, name), given) = next(iter(resources(text).items()))
    jobs = {job["name"]: job["template"]["spec"] for job in given["spec"]["replicatedJobs"]}
    if tuple(jobs) != PARTS:
        return ["the parts"]
    if given["spec"]["successPolicy"]["targetReplicatedJobs"] != ["trainer"]:
        wrong.append("when the set has ended")
    if given["spec"]["failurePolicy"]["maxRestarts"] < 1:
        wrong.append("a set that has failed is not made again")
    # JobSet's names of pods, in the place of those of the Jobs and their services
    names = {
        "megatron-r3-sampler": f"{name}-sampler-0-0.{name}",
        "megatron-r3-trainer-0.megatron-r3-trainer": f"{name}-trainer-0-0.{name}",
    }
    for part, job in jobs.items():
        own, other = job["template"], there["Job", f"megatron-r3-{part}"]["spec"]["template"]
        if renamed(_compared(other), names) != _compared(own):
            wrong.append(f"the pod of the {part} is not that of the Job")
        (container,) = own["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in own["spec"]["volumes"]}
        if {mount["name"] for mount in container["volumeMounts"]} != set(volumes):
            wrong.append(f"the volumes of the {part}")
        claim = volumes["volume"]["persistentVolumeClaim"]["claimName"]
        if "PersistentVolumeClaim" not in {kind for kind, name in shared() if name == claim}:
            wrong.append(f"the claim of the {part}")
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    trainer = jobs["trainer"]
    if not int(env["PET_NNODES"]) == trainer["parallelism"] == trainer["completions"]:
        wrong.append("the trainer's nodes")
    return wrong


def _compared(template: dict[str, Any]) -> dict[str, Any]:
    """What the pods of Job and JobSet must share; each has a network and volumes of its own."""
    spec = dict(template["spec"])
    (container,) = spec.pop("containers")
    container = {key: value for key, value in container.items() if key != "volumeMounts"}
    others = {k: v for k, v in spec.items() if k not in ("volumes", "subdomain")}
    return {"metadata": template["metadata"], "container": container, **others}


def renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: renamed(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [renamed(inner, names) for inner in value]
    return names.get(value, value) if isinstance(value, str) else value


def shared(text: str = KUBERNETES) -> set[tuple[str, str]]:
    """What `kubectl apply -f docker/launch/kubernetes.yaml -l part=shared` takes."""
    return {
        key
        for key, resource in resources(text).items()
        if resource["metadata"].get("labels", {}).get("part") == "shared"
    }


def test_the_set_fits_together_and_its_pods_are_those_of_the_jobs() -> None:
    assert wrong_set(JOBSET) == []


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("name: megatron-r3\n", "name: other\n", "the pod of the collector"),
        ('"rl", "sampler"', '"rl", "collector"', "the pod of the sampler"),
        ("- name: trainer\n", "- name: train\n", "the parts"),
        ('["trainer"]', '["sampler"]', "when the set has ended"),
        ("maxRestarts: 3", "maxRestarts: 0", "a set that has failed"),
        ("trainer-0-0.", "trainer-0.", "the pod of the trainer"),
        ("run.toml --print", "run.toml", "the pod of the trainer"),
        ("part: collector}", "part: trainer}", "the pod of the collector"),
        ("{claimName: megatron-r3}", "{claimName: other}", "the claim of the sampler"),
        ("{name: memory, mount", "{name: mem, mount", "the volumes of the sampler"),
        ("parallelism: 2", "parallelism: 3", "the trainer's nodes"),
    ],
)
def test_a_set_that_does_not_fit_is_found(before: str, after: str, complaint: str) -> None:
    assert before in JOBSET
    assert wrong_set(JOBSET.replace(before, after, 1))[0].startswith(complaint)


def test_the_set_takes_the_volume_and_the_network_policy_alone() -> None:
    assert shared() == {
        ("PersistentVolumeClaim", "megatron-r3"),
        ("NetworkPolicy", "megatron-r3-sampler"),
    }
    assert "kubectl apply -f docker/launch/kubernetes.yaml -l part=shared\n" in JOBSET
    assert not shared(KUBERNETES.replace("part: shared", "part: own"))
