"""Manifests and the Dockerfile, checked without a cluster: ``python -m deploy.check``.

Each file of this folder has the checks of one program: kustomize (:mod:`.kustomize`),
an API server (:mod:`.resource_definitions`, :mod:`.core_kinds`), KubeRay's operator
(:mod:`.operator_rules`), and mistakes that every server accepts
(:mod:`.consistency`).
"""
