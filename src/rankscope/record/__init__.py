"""The vocabulary: frozen data that every other room may import. No torch, no zmq, no printing."""
