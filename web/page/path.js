// SPDX-License-Identifier: Apache-2.0
//
// Which lessons each room goes with.
export const LESSONS_OF = {compare: [1, 3], tiles: [5, 9], walk: [6], paper: [7], backward: [8], race: [10, 11], which: [12, 13], roofline: [14]};

/** The rooms of a lesson. */
export const roomsOf = (lesson) => Object.keys(LESSONS_OF).filter((room) => LESSONS_OF[room].includes(lesson));
