"""Commands over a cluster, by the user's kubeconfig. Their client is imported when one of them is called."""
