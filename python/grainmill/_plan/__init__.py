"""What a pipeline is: frozen nodes that check and describe themselves and do no work."""
