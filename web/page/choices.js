// SPDX-License-Identifier: Apache-2.0
//
// Lists that several rooms offer.
import {ask} from './core.js';

export const MASKS = [['none', 'none'], ['bottom-right', 'causal'], ['top-left', 'causal, top left']];
export const SCHEDULES = ['standard', 'fa1', 'fa2', 'fa3'];
export const devices = () => ask({ask: 'devices'}).map((device) => [device.name, device.title]);
/** GPUs with bf16 GEMMs, which the race plays. */
export const gpus = () => ask({ask: 'devices'}).filter((device) => device.gpu && device.bf16).map((device) => [device.name, device.title]);
