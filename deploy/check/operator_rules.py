"""Rules of KubeRay's operator (v1.7.0) that the API server does not check. Each rule is a function
of a RayCluster's spec, or of a RayJob, that yields violations. Fields behind a feature gate that is
off by default are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

Fields = dict[str, Any]

MOST_CLUSTER_NAME = 53
MOST_JOB_NAME = 47
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_V2_VARIABLE = "RAY_enable_autoscaler_v2"
_START_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_REDIS_VARIABLES = ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS")


def problems(manifest: Fields) -> Iterator[str]:
    """Return the fields of a RayCluster or a RayJob that the operator rejects, with reasons."""
    kind = manifest["kind"]
    metadata = manifest.get("metadata") or {}
    if kind == "RayCluster":
        yield from _name(metadata, MOST_CLUSTER_NAME)
        yield from cluster_problems(manifest["spec"], metadata)
    elif kind == "RayJob":
        yield from _name(metadata, MOST_JOB_NAME)
        for rule in JOB_RULES:
            yield from (f"spec.{problem}" for problem in rule(manifest["spec"]))
        if (spec := manifest["spec"].get("rayClusterSpec")) is not None:
            for problem in cluster_problems(spec, metadata):
                yield problem.replace("spec.", "spec.rayClusterSpec.", 1)


def cluster_problems(spec: Fields, metadata: Fields) -> Iterator[str]:
    """Return the problems of a RayCluster's spec; ``metadata`` has its annotations."""
    for rule in CLUSTER_RULES:
        yield from (f"spec.{problem}" for problem in rule(spec))
    yield from (f"spec.{problem}" for problem in _redis_annotations(spec, metadata))


def _name(metadata: Fields, most: int) -> Iterator[str]:
    name = metadata.get("name", "")
    if len(name) > most:
        yield f"metadata.name: {name!r} has {len(name)} characters; at most {most}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield (
            f"metadata.name: {name!r}; accepted: lower case letters, digits and '-', with a letter "
            "first"
        )


def _groups(spec: Fields) -> Iterator[tuple[str, Fields]]:
    yield "headGroupSpec", spec["headGroupSpec"]
    yield from _workers(spec)


def _workers(spec: Fields) -> Iterator[tuple[str, Fields]]:
    for number, group in enumerate(spec.get("workerGroupSpecs") or ()):
        yield f"workerGroupSpecs.{number}", group


def _pod(group: Fields) -> Fields:
    return (group.get("template") or {}).get("spec") or {}


def _parameters(group: Fields) -> Fields:
    return group.get("rayStartParams") or {}


def _variables(group: Fields) -> dict[str, Any]:
    """Return the environment variables of the Ray container, which is the first."""
    containers = _pod(group).get("containers") or [{}]
    return {one["name"]: one.get("value", "") for one in containers[0].get("env") or ()}


def _uses_v2(spec: Fields) -> bool:
    if (spec.get("autoscalerOptions") or {}).get("version") == "v2":
        return True
    return str(_variables(spec["headGroupSpec"]).get(_V2_VARIABLE, "")).lower() in ("1", "true")


def _has_ray_container(spec: Fields) -> Iterator[str]:
    for where, group in _groups(spec):
        if not _pod(group).get("containers"):
            yield f"{where}.template.spec.containers: none; the first is Ray's"


def _resources_in_one_place(spec: Fields) -> Iterator[str]:
    for where, group in _groups(spec):
        both = [name for name in _START_RESOURCES if name in _parameters(group)]
        if group.get("resources") and both:
            yield f"{where}: has resources, and {', '.join(both)} in rayStartParams; give one"


def _labels(spec: Fields) -> Iterator[str]:
    for where, group in _groups(spec):
        if "labels" in _parameters(group):
            yield f"{where}.rayStartParams.labels: refused; give {where}.labels"
        for key, value in (group.get("labels") or {}).items():
            if not re.fullmatch(_LABEL_KEY, key) or not re.fullmatch(_LABEL_VALUE, str(value)):
                yield f"{where}.labels: {key!r}: {value!r} is no label of Kubernetes"


def _replicas(spec: Fields) -> Iterator[str]:
    scales = spec.get("enableInTreeAutoscaling")
    for where, group in _workers(spec):
        least, most = group.get("minReplicas"), group.get("maxReplicas")
        if not scales and (least is None or most is None):
            yield f"{where}: without autoscaling minReplicas and maxReplicas must be given"
        for name in ("minReplicas", "maxReplicas"):
            if (group.get(name) or 0) < 0:
                yield f"{where}.{name}: {group[name]} is negative"
        if least is not None and most is not None and least > most:
            yield f"{where}.minReplicas: {least} is above maxReplicas, {most}"


def _autoscaler(spec: Fields) -> Iterator[str]:
    scales, options = spec.get("enableInTreeAutoscaling"), spec.get("autoscalerOptions") or {}
    variable = _variables(spec["headGroupSpec"]).get(_V2_VARIABLE)
    if scales:
        for where, group in _workers(spec):
            if group.get("suspend"):
                yield f"{where}.suspend: not with enableInTreeAutoscaling"
        if options.get("version") is not None and variable is not None:
            yield f"headGroupSpec: {_V2_VARIABLE} is set, and autoscalerOptions.version; give one"
    elif str(variable).lower() in ("1", "true"):
        yield f"headGroupSpec: {_V2_VARIABLE} is set, but enableInTreeAutoscaling is not"
    if (options.get("idleTimeoutSeconds") or 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds: is negative"
    names = {one["name"] for one in options.get("env") or ()}
    if "KUBERAY_GEN_AUTOSCALER_START_CMD" in names:
        yield "autoscalerOptions.env: KUBERAY_GEN_AUTOSCALER_START_CMD is the operator's"


def _restarts(spec: Fields) -> Iterator[str]:
    if not spec.get("enableInTreeAutoscaling") or not _uses_v2(spec):
        return
    for where, group in _groups(spec):
        if (policy := _pod(group).get("restartPolicy")) not in (None, "", "Never"):
            yield f"{where}.template.spec.restartPolicy: {policy}; autoscaler v2 needs Never"


def _of_v2(spec: Fields) -> Iterator[str]:
    for where, group in _workers(spec):
        for name in ("idleTimeoutSeconds", "priority"):
            if group.get(name) is not None and not _uses_v2(spec):
                yield f"{where}.{name}: only with autoscaler v2"
        if (group.get("idleTimeoutSeconds") or 0) < 0:
            yield f"{where}.idleTimeoutSeconds: is negative"
        if group.get("priority") is not None and _version(spec) < (2, 56, 0):
            yield f"{where}.priority: needs rayVersion 2.56.0 or newer"


def _version(spec: Fields) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", str(spec.get("rayVersion", "")))
    return tuple(map(int, numbers.groups())) if numbers else (0,)


def _tokens(spec: Fields) -> Iterator[str]:
    options = spec.get("authOptions") or {}
    if options.get("mode") == "token" and _version(spec) < (2, 52, 0):
        yield f"authOptions.mode: token needs rayVersion 2.52.0; it is {spec.get('rayVersion')!r}"
    if options.get("enableK8sTokenAuth"):
        if _version(spec) < (2, 55, 0):
            yield "authOptions.enableK8sTokenAuth: needs rayVersion 2.55.0"
        if options.get("secretName"):
            yield "authOptions.secretName: not with enableK8sTokenAuth"


def _feature_gates(spec: Fields) -> Iterator[str]:
    for name in ("networkPolicy", "tlsOptions", "historyServerOptions"):
        if spec.get(name) is not None:
            yield f"{name}: its feature gate is off by default"
    if (spec.get("tlsOptions") or {}).get("enabled"):
        for where, group in _groups(spec):
            for variable in _variables(group):
                if variable == "RAY_USE_TLS" or variable.startswith("RAY_TLS_"):
                    yield f"{where}: {variable} is set, and tlsOptions"


def _fault_tolerance(spec: Fields) -> Iterator[str]:
    options, head = spec.get("gcsFaultToleranceOptions"), spec["headGroupSpec"]
    variables = _variables(head)
    if options is None:
        if "redis-username" in _parameters(head) or "REDIS_USERNAME" in variables:
            yield "headGroupSpec: redis-username is given; give gcsFaultToleranceOptions"
        if "RAY_REDIS_ADDRESS" in variables:
            yield "headGroupSpec: RAY_REDIS_ADDRESS is set; give gcsFaultToleranceOptions"
        return
    twice = [name for name in _REDIS_VARIABLES if name in variables]
    twice += [
        name for name in ("redis-password", "redis-username") if name in _parameters(head)
    ]
    if twice:
        yield f"headGroupSpec: {', '.join(twice)} given, and gcsFaultToleranceOptions; give one"
    if options.get("backend") == "rocksdb":
        yield "gcsFaultToleranceOptions.backend: rocksdb's feature gate is off by default"
        for name in ("redisAddress", "redisPassword", "redisUsername"):
            if options.get(name) is not None:
                yield f"gcsFaultToleranceOptions.{name}: not with rocksdb"
    elif options.get("storage") is not None:
        yield "gcsFaultToleranceOptions.storage: only with backend rocksdb"


def _redis_annotations(spec: Fields, metadata: Fields) -> Iterator[str]:
    if spec.get("gcsFaultToleranceOptions") is None:
        return
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if name in (metadata.get("annotations") or {}):
            yield f"gcsFaultToleranceOptions: not with the annotation {name}"


def _job_cluster(job: Fields) -> Iterator[str]:
    selector, spec = job.get("clusterSelector"), job.get("rayClusterSpec")
    if bool(selector) == (spec is not None):
        yield "rayClusterSpec: give it or clusterSelector, and not both"
    if not selector:
        return
    if not selector.get("ray.io/cluster"):
        yield "clusterSelector: ray.io/cluster must say which cluster"
    if job.get("suspend"):
        yield "suspend: not with clusterSelector"
    if job.get("submissionMode") == "SidecarMode":
        yield "submissionMode: SidecarMode not with clusterSelector"
    if (job.get("backoffLimit") or 0) > 0:
        yield "backoffLimit: not with clusterSelector"


def _job_end(job: Fields) -> Iterator[str]:
    ends = job.get("shutdownAfterJobFinishes")
    if job.get("suspend") and not ends:
        yield "suspend: needs shutdownAfterJobFinishes"
    keeps = job.get("ttlSecondsAfterFinished") or 0
    if keeps < 0:
        yield f"ttlSecondsAfterFinished: {keeps} is negative"
    if keeps > 0 and not ends:
        yield "ttlSecondsAfterFinished: needs shutdownAfterJobFinishes"


def _job_numbers(job: Fields) -> Iterator[str]:
    for name in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if job.get(name) is not None and job[name] <= 0:
            yield f"{name}: {job[name]}; must be above 0"
    if (job.get("backoffLimit") or 0) < 0:
        yield f"backoffLimit: {job['backoffLimit']} is negative"


def _job_mode(job: Fields) -> Iterator[str]:
    mode = job.get("submissionMode")
    if mode == "InteractiveMode" and (job.get("backoffLimit") or 0) > 0:
        yield "backoffLimit: not with InteractiveMode"
    if mode == "SidecarMode":
        for name in ("submitterPodTemplate", "submitterConfig"):
            if job.get(name) is not None:
                yield f"{name}: not with SidecarMode"
        head = (job.get("rayClusterSpec") or {}).get("headGroupSpec") or {}
        if (policy := _pod(head).get("restartPolicy")) not in (None, "", "Never"):
            yield f"rayClusterSpec.headGroupSpec: restartPolicy {policy}; SidecarMode needs Never"


def _job_environment(job: Fields) -> Iterator[str]:
    try:
        environment = yaml.safe_load(job.get("runtimeEnvYAML") or "{}")
    except yaml.YAMLError as error:
        yield f"runtimeEnvYAML: {' '.join(str(error).split())}"
        return
    if not isinstance(environment, dict):
        yield f"runtimeEnvYAML: is {environment!r}, and no mapping"


def _job_authentication(job: Fields) -> Iterator[str]:
    options = (job.get("rayClusterSpec") or {}).get("authOptions") or {}
    if options.get("enableK8sTokenAuth"):
        yield "rayClusterSpec.authOptions.enableK8sTokenAuth: not for a RayJob"


def _job_deletion(job: Fields) -> Iterator[str]:
    strategy = job.get("deletionStrategy") or {}
    rules = strategy.get("deletionRules") or ()
    if not rules:
        return
    if job.get("shutdownAfterJobFinishes"):
        yield "deletionStrategy.deletionRules: not with shutdownAfterJobFinishes"
    seen: set[tuple[str, str]] = set()
    delays: dict[str, dict[str, int]] = {}
    for number, rule in enumerate(rules):
        condition = rule.get("condition") or {}
        state = condition.get("jobStatus") or condition.get("jobDeploymentStatus") or ""
        if (state, rule["policy"]) in seen:
            yield f"deletionStrategy.deletionRules.{number}: {rule['policy']} on {state} twice"
        seen.add((state, rule["policy"]))
        delays.setdefault(state, {})[rule["policy"]] = condition.get("ttlSeconds") or 0
        scales = (job.get("rayClusterSpec") or {}).get("enableInTreeAutoscaling")
        if rule["policy"] == "DeleteWorkers" and (scales or job.get("clusterSelector")):
            yield (
                f"deletionStrategy.deletionRules.{number}: DeleteWorkers not with autoscaling or "
                "clusterSelector"
            )
    for state, of_state in delays.items():
        order = [of_state[name] for name in _DELETIONS if name in of_state]
        if order != sorted(order):
            yield f"deletionStrategy.deletionRules: on {state} ttlSeconds must grow with the extent"


_DELETIONS = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")

CLUSTER_RULES: tuple[Callable[[Fields], Iterator[str]], ...] = (
    _has_ray_container, _resources_in_one_place, _labels, _replicas, _autoscaler, _restarts, _of_v2,
    _tokens, _feature_gates, _fault_tolerance,
)
JOB_RULES: tuple[Callable[[Fields], Iterator[str]], ...] = (
    _job_cluster, _job_end, _job_numbers, _job_mode, _job_environment, _job_authentication,
    _job_deletion,
)
