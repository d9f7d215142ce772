// SPDX-License-Identifier: Apache-2.0
//
// Which lessons each room goes with.
export const LESSONS_OF = {compare: [0, 1, 3], tiles: [5, 10], walk: [6], paper: [7, 8, 9], backward: [9], race: [11, 12], which: [13, 14], roofline: [15, 16]};

/** The rooms of a lesson. */
export const roomsOf = (lesson) => Object.keys(LESSONS_OF).filter((room) => LESSONS_OF[room].includes(lesson));
