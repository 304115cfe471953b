"""raymm on Kubernetes: an image, manifests for KubeRay, and what checks them."""
