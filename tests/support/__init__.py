"""Models, comparers and a training loop that tests share."""
