"""Manifests and the Dockerfile, checked without a cluster: ``python -m deploy.check``.

Each file of this folder is one thing that would refuse them: what builds them (:mod:`.kustomize`),
an API server (:mod:`.resource_definitions`, :mod:`.core_kinds`), KubeRay's operator
(:mod:`.operator_rules`), and what nobody would refuse, but would not work
(:mod:`.consistency`).
"""
