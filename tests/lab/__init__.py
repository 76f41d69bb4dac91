"""The suite on what people have: releases of torch, of Python and of what rankscope needs."""
