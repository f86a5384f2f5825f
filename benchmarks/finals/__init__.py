"""How good a model is when training is over: this server beside the clusters that an expert would build by hand, in the same
simulated time. Real gradients; a clock that counts only the time that gradients take."""
