"""Each of the operator's rules, alone, on the smallest valid cluster and job."""

import copy

import pytest

from deploy.check.kustomize import json_patch
from deploy.check.operator_rules import CLUSTER_RULES, JOB_RULES, problems


def group(name: str, **more) -> dict:
    return {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": name, "env": []}]}},
            **more}


CLUSTER = {
    "apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "c", "annotations": {}},
    "spec": {
        "rayVersion": "2.60.0", "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2"}, "headGroupSpec": group("head"),
        "workerGroupSpecs": [group("worker", groupName="w", minReplicas=0, maxReplicas=2)],
    },
}
JOB = {
    "apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "j"},
    "spec": {"entrypoint": "true", "rayClusterSpec": CLUSTER["spec"],
             "shutdownAfterJobFinishes": True},
}
HEAD, WORKER = "/spec/headGroupSpec", "/spec/workerGroupSpecs/0"
HEAD_ENV, OPTIONS = f"{HEAD}/template/spec/containers/0/env/-", "/spec/autoscalerOptions"
REDIS = "/spec/gcsFaultToleranceOptions"
OF_JOB = "/spec/rayClusterSpec"


def variable(name: str, value: str = "1") -> dict[str, str]:
    return {"name": name, "value": value}


def cases(manifest, *rows):
    return [(manifest, *row) for row in rows]


# (document, rule's number and part, values by path, message); None removes.
RULES = [
    *cases(
        CLUSTER,
        ("1 length", {"/metadata/name": "c" * 54}, "at most 53"),
        ("1 letter first", {"/metadata/name": "1c"}, "letter"),
        ("1 no dots", {"/metadata/name": "a.b"}, "accepted"),
        ("2", {f"{WORKER}/template/spec/containers": []}, "the first is Ray's"),
        ("3", {f"{WORKER}/resources": {"CPU": "2"}, f"{WORKER}/rayStartParams/num-cpus": "2"},
         "give one"),
        ("4 parameter", {f"{HEAD}/rayStartParams/labels": "a=b"}, "rayStartParams.labels"),
        ("4 syntax", {f"{HEAD}/labels": {"a b": "c"}}, "no label"),
        ("5 not given", {"/spec/enableInTreeAutoscaling": False, f"{WORKER}/minReplicas": None},
         "must be given"),
        ("5 negative", {f"{WORKER}/minReplicas": -1}, "negative"),
        ("5 order", {f"{WORKER}/minReplicas": 3}, "above maxReplicas"),
        ("6 suspended", {f"{WORKER}/suspend": True}, "suspend"),
        ("6 both", {HEAD_ENV: variable("RAY_enable_autoscaler_v2")}, "give one"),
        ("6 off", {"/spec/enableInTreeAutoscaling": False,
                   HEAD_ENV: variable("RAY_enable_autoscaler_v2", "true")}, "is not"),
        ("7 head", {f"{HEAD}/template/spec/restartPolicy": "OnFailure"}, "needs Never"),
        ("7 by variable", {OPTIONS: {}, HEAD_ENV: variable("RAY_enable_autoscaler_v2"),
                           f"{WORKER}/template/spec/restartPolicy": "Always"}, "needs Never"),
        ("8 negative", {f"{OPTIONS}/idleTimeoutSeconds": -1}, "negative"),
        ("8 of v2", {OPTIONS: {"version": "v1"}, f"{WORKER}/idleTimeoutSeconds": 5}, "only with"),
        ("8 priority", {"/spec/rayVersion": "2.55.1", f"{WORKER}/priority": 1}, "2.56.0"),
        ("9", {f"{OPTIONS}/env": [variable("KUBERAY_GEN_AUTOSCALER_START_CMD")]}, "operator's"),
        ("10 annotation", {REDIS: {"redisAddress": "r:6379"},
                           "/metadata/annotations/ray.io~1ft-enabled": "true"}, "ft-enabled"),
        ("10 namespace", {REDIS: {"redisAddress": "r:6379"}, "/metadata/annotations/"
                          "ray.io~1external-storage-namespace": "n"}, "external-storage"),
        ("10 password", {REDIS: {"redisAddress": "r:6379"},
                         f"{HEAD}/rayStartParams/redis-password": "p"}, "redis-password"),
        ("10 variable", {REDIS: {"redisAddress": "r:6379"}, HEAD_ENV: variable("REDIS_PASSWORD")},
         "REDIS_PASSWORD"),
        ("10 user", {f"{HEAD}/rayStartParams/redis-username": "u"}, "redis-username"),
        ("10 address", {HEAD_ENV: variable("RAY_REDIS_ADDRESS")}, "RAY_REDIS_ADDRESS"),
        ("10 gate", {REDIS: {"backend": "rocksdb"}}, "feature gate"),
        ("10 rocksdb", {REDIS: {"backend": "rocksdb", "redisAddress": "r"}}, "not with rocksdb"),
        ("10 storage", {REDIS: {"storage": {"size": "1Gi"}}}, "only with backend"),
        ("11 version", {"/spec/rayVersion": "2.51.0", "/spec/authOptions": {"mode": "token"}},
         "2.52.0"),
        ("11 unset", {"/spec/rayVersion": None, "/spec/authOptions": {"mode": "token"}}, "2.52.0"),
        ("11 service accounts", {
            "/spec/rayVersion": "2.54.0", "/spec/authOptions": {"enableK8sTokenAuth": True},
        }, "2.55.0"),
        ("11 secret", {"/spec/authOptions": {"enableK8sTokenAuth": True, "secretName": "s"}},
         "secretName"),
        ("12 network", {"/spec/networkPolicy": {}}, "feature gate"),
        ("12 TLS", {"/spec/tlsOptions": {"enabled": True}, HEAD_ENV: variable("RAY_TLS_CA_CERT")},
         "RAY_TLS_CA_CERT"),
    ),
    *cases(
        JOB,
        ("1 length", {"/metadata/name": "j" * 48}, "at most 47"),
        ("1-12 of its cluster", {f"{OF_JOB}/workerGroupSpecs/0/minReplicas": 3},
         "spec.rayClusterSpec.workerGroupSpecs.0.minReplicas"),
        ("13 both", {"/spec/clusterSelector": {"ray.io/cluster": "c"}}, "not both"),
        ("13 neither", {OF_JOB: None}, "give it or"),
        ("13 empty", {OF_JOB: None, "/spec/clusterSelector": {"ray.io/cluster": ""}}, "which"),
        ("13 suspend", {OF_JOB: None, "/spec/clusterSelector": {"ray.io/cluster": "c"},
                        "/spec/suspend": True}, "suspend: not with clusterSelector"),
        ("13 sidecar", {OF_JOB: None, "/spec/clusterSelector": {"ray.io/cluster": "c"},
                        "/spec/submissionMode": "SidecarMode"}, "SidecarMode not with"),
        ("13 backoff", {OF_JOB: None, "/spec/clusterSelector": {"ray.io/cluster": "c"},
                        "/spec/backoffLimit": 1}, "backoffLimit: not with clusterSelector"),
        ("14", {"/spec/suspend": True, "/spec/shutdownAfterJobFinishes": False}, "suspend: needs"),
        ("15 negative", {"/spec/ttlSecondsAfterFinished": -1}, "negative"),
        ("15", {"/spec/ttlSecondsAfterFinished": 1, "/spec/shutdownAfterJobFinishes": False},
         "ttlSecondsAfterFinished: needs"),
        ("16", {"/spec/submissionMode": "InteractiveMode", "/spec/backoffLimit": 1},
         "not with InteractiveMode"),
        ("17 template", {"/spec/submissionMode": "SidecarMode", "/spec/submitterPodTemplate": {}},
         "submitterPodTemplate: not"),
        ("17 config", {"/spec/submissionMode": "SidecarMode", "/spec/submitterConfig": {}},
         "submitterConfig: not"),
        ("17 restarts", {
            "/spec/submissionMode": "SidecarMode", f"{OF_JOB}/enableInTreeAutoscaling": False,
            f"{OF_JOB}/headGroupSpec/template/spec/restartPolicy": "Always",
        }, "SidecarMode needs Never"),
        ("18 environment", {"/spec/runtimeEnvYAML": "a: [1"}, "runtimeEnvYAML"),
        ("18 deadline", {"/spec/activeDeadlineSeconds": 0}, "above 0"),
        ("18 start", {"/spec/preRunningDeadlineSeconds": 0}, "above 0"),
        ("18 backoff", {"/spec/backoffLimit": -1}, "negative"),
        ("11 of jobs", {f"{OF_JOB}/authOptions": {"enableK8sTokenAuth": True}}, "not for a RayJob"),
        ("19 shutdown", {"/spec/deletionStrategy": {"deletionRules": [
            {"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED"}}]}},
         "not with shutdownAfterJobFinishes"),
        ("19 workers", {"/spec/shutdownAfterJobFinishes": False,
                        "/spec/deletionStrategy": {"deletionRules": [
            {"policy": "DeleteWorkers", "condition": {"jobStatus": "FAILED"}}]}},
         "not with autoscaling"),
        ("19 order", {"/spec/shutdownAfterJobFinishes": False,
                      "/spec/deletionStrategy": {"deletionRules": [
            {"policy": "DeleteCluster", "condition": {"jobStatus": "FAILED", "ttlSeconds": 9}},
            {"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED", "ttlSeconds": 3}}]}},
         "must grow"),
        ("19 twice", {"/spec/shutdownAfterJobFinishes": False,
                      "/spec/deletionStrategy": {"deletionRules": [
            {"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED"}}] * 2}}, "twice"),
    ),
]


def operations(values):
    return [
        {"op": "remove", "path": path} if value is None
        else {"op": "add", "path": path, "value": value} for path, value in values.items()
    ]


@pytest.mark.parametrize(
    ("manifest", "rule", "values", "says"), RULES,
    ids=[f"{row[0]['kind']} {row[1]}" for row in RULES],
)
def test_rule(manifest, rule, values, says):
    assert list(problems(manifest)) == []
    found = list(problems(json_patch(copy.deepcopy(manifest), operations(values))))
    assert any(says in problem for problem in found), found


def test_every_rule_is_broken_above():
    """Require a row for each rule, so that every rule is tested."""
    for rules, kind in ((CLUSTER_RULES, "RayCluster"), (JOB_RULES, "RayJob")):
        for rule in rules:
            assert any(
                list(rule(json_patch(manifest, operations(values))["spec"]))
                for manifest, _, values, _ in RULES if manifest["kind"] == kind
            ), rule.__name__
