#include "back.cuh"
